"""Which names of other packages the engines rely on, as data, and their comparison with unpacked sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from tests.support.sources import Class, Function, Package, parameters, required


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """``name`` of ``module``; an empty name is the module itself.

    ``members`` are attributes of a class, or names of a module. ``calls`` are methods (``()``: the function itself)
    with parameters that we pass or that our override receives. ``on``: where it is imported. ``why`` is the reason to
    rely on a name that is no public interface of its package.
    """

    module: str
    name: str = ""
    members: tuple[str, ...] = ()
    calls: tuple[tuple[str, tuple[str, ...]], ...] = ()
    on: Literal["all", "cpu"] = "all"
    why: str = ""


def problems(package: Package, table: Iterable[Used]) -> list[str]:
    """One line for each name, member or parameter that the sources lack."""
    return [line for used in table for line in _of(package, used)]


def newly_required(package: Package, older: Package, table: Iterable[Used]) -> list[str]:
    """One line for each call whose function has a parameter without a default that it did not have in ``older``."""
    lines = []
    for used in table:
        for name, _ in used.calls:
            now, before = (_function(each, used, name) for each in (package, older))
            if isinstance(now, Function) and isinstance(before, Function):
                added = required(now) - set(parameters(before)[0])
                lines += [f"{used.module}.{used.name}.{name} requires {p}" for p in sorted(added)]
    return lines


def _function(package: Package, used: Used, name: str) -> object:
    if not used.name:
        return package.find(used.module, name)
    found = package.find(used.module, used.name)
    return found.methods().get(name) if isinstance(found, Class) else found


def _of(package: Package, used: Used) -> Iterator[str]:
    if package.tree(used.module) is None:
        yield f"no module {used.module}"
        return
    if not used.name:
        for name in used.members:
            if package.find(used.module, name) is None:
                yield f"{used.module} has no {name}"
        yield from _calls(used, {name: package.find(used.module, name) for name, _ in used.calls})
        return
    found = package.find(used.module, used.name)
    if found is None:
        yield f"{used.module} has no {used.name}"
    elif isinstance(found, Class):
        members = found.members()
        for name in used.members:
            if name not in members:
                yield f"{used.module}.{used.name} has no {name}"
        yield from _calls(used, found.methods(), found.fields())
    else:
        yield from _calls(used, {"": found})


def _calls(used: Used, methods: dict[str, object], fields: Iterable[str] = ()) -> Iterator[str]:
    where = f"{used.module}.{used.name}".rstrip(".")
    for name, wanted in used.calls:
        method = methods.get(name)
        if name == "__init__" and method is None:
            names, free = list(fields), False
        elif isinstance(method, Function):
            names, free = parameters(method)
        else:
            yield f"{where} has no {name}"
            continue
        missing = [p for p in wanted if p not in names]
        if missing and not free:
            yield f"{where}.{name} takes {', '.join(names)}, not {', '.join(missing)}"


def count(table: Iterable[Used]) -> int:
    """Names, members and parameters in a table."""
    return sum(1 + len(used.members) + sum(1 + len(p) for _, p in used.calls) for used in table)
