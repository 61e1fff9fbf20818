"""What modules of an unpacked package define, from their syntax trees. Nothing is imported or executed."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Class:
    """A class definition and the package that it was found in."""

    package: Package
    module: str
    node: ast.ClassDef

    def lineage(self) -> Iterator[Class]:
        """This class and its bases, as far as the package defines them."""
        yield self
        for base in self.node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            found = self.package.find(self.module, ast.unparse(name))
            if isinstance(found, Class):
                yield from found.lineage()

    def methods(self) -> dict[str, Function]:
        found: dict[str, Function] = {}
        for cls in self.lineage():
            for node in ast.walk(cls.node):
                if isinstance(node, Function):
                    found.setdefault(node.name, node)
        return found

    def members(self) -> set[str]:
        """Names in the class body, of methods, and of attributes that any method sets."""
        names: set[str] = set(self.methods())
        for cls in self.lineage():
            for node in ast.walk(cls.node):
                targets: Sequence[ast.expr] = ()
                if isinstance(node, ast.Assign):
                    targets = node.targets
                elif isinstance(node, ast.AnnAssign):
                    targets = [node.target]
                for target in targets:
                    for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                        if isinstance(part, ast.Name):
                            names.add(part.id)
                        elif isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                            names.add(part.attr)
        return names

    def fields(self) -> list[str]:
        """Annotated names of the class body in order, the bases' first: a dataclass's parameters."""
        names: list[str] = []
        for cls in reversed(list(self.lineage())):
            annotated = [node.target for node in cls.node.body if isinstance(node, ast.AnnAssign)]
            names += [target.id for target in annotated if isinstance(target, ast.Name)]
        return names


class Package:
    """Sources below ``root``, the folder that contains the top package."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cache  # noqa: B019 -- lives as long as a test
    def tree(self, module: str) -> ast.Module | None:
        path = self.root / module.replace(".", "/")
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def find(self, module: str, name: str, depth: int = 0) -> Class | Function | ast.AST | None:
        """What ``name`` is in ``module``; imports are followed. None if the module does not define it."""
        tree = self.tree(module)
        if tree is None or depth > 8:
            return None
        head, _, rest = name.partition(".")
        for node in reversed(list(_statements(tree.body))):  # the last definition counts
            if isinstance(node, ast.ClassDef) and node.name == head:
                return Class(self, module, node)
            if isinstance(node, Function) and node.name == head:
                return node
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == head for t in node.targets):
                return node
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == head:
                return node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == head:
                        source = _absolute(module, node, self)
                        found = self.find(source, alias.name, depth + 1)
                        inner = f"{source}.{alias.name}"
                        if found is not None or self.tree(inner) is None:
                            return found
                        return self.find(inner, rest, depth + 1) if rest else node
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if rest and alias.asname == head:
                        return self.find(alias.name, rest, depth + 1)
        return self._lazy(tree, head, depth)

    def _lazy(self, tree: ast.Module, name: str, depth: int) -> Class | Function | ast.AST | None:
        """A name of a package that loads on demand: ``{"Name": ".module:Name"}`` or ``{"Name": "module"}``."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant):
                        return value
        if any(isinstance(n, Function) and n.name == "__getattr__" for n in tree.body):
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and node.value == name:
                    return node
        return None


def trees(folder: Path, words: Collection[str]) -> Iterator[tuple[Path, ast.Module]]:
    """Files below ``folder`` with one of ``words`` in their text; others are not parsed."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if any(word in text for word in words):
            yield path, ast.parse(text)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under ``if`` and ``try`` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)
            yield from _statements(node.orelse)
            yield from _statements(node.body)


def _absolute(module: str, node: ast.ImportFrom, package: Package) -> str:
    if not node.level:
        return node.module or ""
    is_package = (package.root / module.replace(".", "/") / "__init__.py").is_file()
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def parameters(function: Function) -> tuple[list[str], bool]:
    """Names of the parameters without ``self``, and whether any keyword is accepted."""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [n for n in names if n not in ("self", "cls")], arguments.kwarg is not None


def required(function: Function) -> set[str]:
    """Names of the parameters without a default, without ``self``."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    needed = positional[: len(positional) - len(arguments.defaults)]
    needed += [a for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None]
    return {a.arg for a in needed} - {"self", "cls"}


def imported(files: Sequence[Path], top: str) -> set[tuple[str, str]]:
    """(module, name) that these files import from package ``top``; an empty name for whole modules."""
    found: set[tuple[str, str]] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == top and not node.level:
                found |= {(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(a.name, "") for a in node.names if a.name.split(".")[0] == top}
    return found
