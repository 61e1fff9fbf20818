"""docs/en/design/README.md: every contract that the repository cites has an entry, and every entry tests that exist."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "en" / "design" / "README.md"
CODE = re.compile(r"\bC(?:1[0-9]|[1-9])\b")
ENTRY = re.compile(r"^## (C\d+) .+$", re.MULTILINE)
PROOF = re.compile(r"^- `(tests/[\w/]+\.py)::(test_\w+)`$", re.MULTILINE)


def entries() -> dict[str, str]:
    """The text of each entry by its code."""
    _, *parts = ENTRY.split(PAGE.read_text(encoding="utf-8"))
    return dict(zip(parts[::2], parts[1::2], strict=True))


def citing_files() -> list[Path]:
    code = [p for folder in ("areal_lora", "tests", "examples", "benchmarks") for p in (ROOT / folder).rglob("*.py")]
    text = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    return [p for p in code + text if p not in (PAGE, Path(__file__))]


def test_the_contracts_are_numbered_without_a_gap():
    assert list(entries()) == [f"C{i}" for i in range(1, 13)]


def test_every_cited_contract_has_an_entry():
    known = entries()
    cited = {code: path for path in citing_files() for code in CODE.findall(path.read_text(encoding="utf-8"))}
    assert len(cited) >= 10, "the search for citations finds nothing any more"
    assert {code: str(path) for code, path in cited.items() if code not in known} == {}


@pytest.mark.parametrize("code", entries())
def test_every_entry_names_tests_that_exist(code):
    proofs = PROOF.findall(entries()[code])
    assert proofs, f"{code} names no test"
    for file, name in proofs:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
        assert name in functions, f"{code}: {file} has no {name}"


@pytest.mark.parametrize("code", entries())
def test_an_entry_is_two_sentences(code):
    statement = entries()[code].strip().split("\n\n")[0]
    assert statement.endswith(".")
    assert len(re.findall(r"[.](?:\s|$)", statement)) == 2, statement
