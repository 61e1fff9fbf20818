"""Tables of used names against unpacked sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from areal_lora.engine.internals import Used
from tests.support.sources import Class, Function, Package, parameters


def problems(package: Package, table: Iterable[Used]) -> list[str]:
    """One line for each name, member or parameter that the sources lack."""
    return [line for used in table for line in _of(package, used)]


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
    """Names, members and parameters that a table asks for."""
    return sum(1 + len(used.members) + sum(1 + len(p) for _, p in used.calls) for used in table)
