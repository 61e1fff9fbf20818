"""A newcomer sees where a test goes: tests/unit mirrors the package, and tests share through tests/support."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT

UNIT = ROOT / "tests" / "unit"
TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py") if "support" not in path.parts)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def mirrored(test: Path) -> bool:
    """``test_<module>.py`` or ``test_<module>_<aspect>.py`` of a module or package in the same folder."""
    folder = ROOT / "areal_lora" / test.relative_to(UNIT).parent
    if not folder.is_dir():
        return False
    modules = {path.stem.strip("_") for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    words = test.stem.removeprefix("test_").split("_")
    return any("_".join(words[:n]) in modules for n in range(1, len(words) + 1))


def imported(path: Path) -> set[str]:
    """Modules that ``path`` imports, also from code that it holds as text."""
    nodes = list(ast.walk(parsed(path)))
    found = {n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module}
    found |= {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    texts = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    lines = [line.split() for block in texts for line in block.splitlines()]
    return found | {words[1] for words in lines if len(words) > 1 and words[0] in ("from", "import")}


def test_every_unit_test_mirrors_a_module():
    found = sorted(UNIT.rglob("test_*.py"))
    assert len(found) > 100, "the search for tests finds nothing any more"
    assert [str(path.relative_to(ROOT)) for path in found if not mirrored(path)] == []


def test_no_test_imports_from_another_test():
    def of_a_test(module: str) -> bool:
        return module.startswith("tests.") and any(part.startswith("test_") for part in module.split("."))

    named = [path for path in TESTS if re.search(r"tests\.[\w.]*test_", path.read_text(encoding="utf-8"))]
    guilty = {str(path.relative_to(ROOT)): name for path in named for name in imported(path) if of_a_test(name)}
    assert guilty == {}


@pytest.mark.parametrize("name", ["EXAMPLES", "TINY_MODEL", "wait_until", "Clock"])
def test_what_tests_share_is_defined_once(name):
    def defined(node: ast.stmt) -> set[str]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return {node.name}
        if isinstance(node, ast.Assign):
            return {target.id for target in node.targets if isinstance(target, ast.Name)}
        return set()

    places = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if name in path.read_text(encoding="utf-8") and any(name in defined(node) for node in parsed(path).body)
    ]
    assert len(places) == 1, places


def test_a_benchmark_finds_the_tests_support():
    """Run as its docstring shows it, it has its own folder on the path, not the repository's root."""
    finds = re.compile(r"sys\.path\.insert|^from rollout_side import|``python -m benchmarks\.", re.MULTILINE)
    scripts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py")}
    needing = {path: text for path, text in scripts.items() if "from tests." in text}
    assert needing
    assert [path.name for path, text in needing.items() if not finds.search(text.partition("from tests.")[0])] == []
