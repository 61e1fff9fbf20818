"""docs/en/support.md is current, its tests exist, and the start-up check agrees with every cell."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from areal_lora.config import support
from areal_lora.config.sections.adapter import PRESETS
from areal_lora.config.support import PACKED, Combination, Layout
from areal_lora.types import ExpertLayout
from docs.tools import support_tables
from docs.tools.support_tables import TABLES, Table, combination, conditions, refused
from tests.support.combinations import said
from tests.support.paths import ROOT

CELLS = [(table, row, column) for table in TABLES for row, column in table.cells()]
NAMED = sorted({test for table in TABLES for tests in table.tests.values() for test in tests})
KNOWN = {*PACKED, *PRESETS, *ExpertLayout}
"""Parameters that tests take from lists of the package."""


def judged(table: Table, row: str, column: str) -> Combination:
    """The combination of a cell; to a model without experts ``per_expert`` is ``none``."""
    c = combination(table, row, column)
    return replace(c, layout="none") if c.layout == "per_expert" and not c.experts else c


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / support_tables.TARGET).read_text(encoding="utf-8")
    assert page == support_tables.render(), "run make docs"


def test_every_cell_is_either_refused_or_names_tests() -> None:
    for table, row, column in CELLS:
        tests = table.tests.get((row, column), ())
        assert bool(tests) != bool(refused(table, row, column)), f"{table.title}: {row}, {column}"
    assert all(set(table.tests) <= set(table.cells()) for table in TABLES)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_the_start_up_check_agrees_with_every_cell(table: Table) -> None:
    for row, column in table.cells():
        c, refusals = judged(table, row, column), refused(table, row, column)
        found = said(c)
        for refusal in refusals:
            text = refusal.text(c.family)
            assert any(path == refusal.key and text in reason for path, reason in found), f"{row}, {column}: {text}"
        assert bool(found) == bool(refusals), f"{row}, {column}: {found}"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_a_condition_is_refused_once_it_holds(table: Table) -> None:
    for row, column in table.cells():
        if refused(table, row, column):
            continue
        for refusal in conditions(table, row, column):
            c = judged(table, row, column)
            c = replace(c, needs=c.needs | refusal.needs)
            for axis in ("engine", "layout", "mode"):
                if values := getattr(refusal, axis):
                    c = replace(c, **{axis: values[0]})
            if refusal.experts is False:
                c = replace(c, family="qwen3", experts=False)
            if refusal.group and c.group not in refusal.group:
                c = replace(c, family="phi3" if "no row" in refusal.group else "bitnet", engine="fsdp", experts=False)
            assert any(refusal.text(c.family) in reason for _, reason in said(c)), f"{row}, {column}: {refusal.reason}"


def test_every_kind_layout_and_ask_is_on_the_page() -> None:
    rows = {row for table in TABLES for row in table.rows}
    asked = {ask for refusal in support.REFUSALS for ask in refusal.needs}
    assert set(PRESETS) <= rows
    assert set(Layout.__args__) <= rows  # type: ignore[attr-defined]
    assert set(support.NEEDS) <= rows | asked


@cache
def module(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def functions(path: Path) -> dict[str, str]:
    """Name and decorators of every test function."""
    found = [node for node in module(path).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {f.name: "\n".join(map(ast.unparse, f.decorator_list)) for f in found if f.name.startswith("test_")}


@cache
def constants(path: Path) -> frozenset[str]:
    """Texts in a test's module and in those of tests.support that it imports."""
    nodes = list(ast.walk(module(path)))
    texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests.support"):
            source = ROOT / f"{str(node.module).replace('.', '/')}.py"
            texts |= constants(source) if source.exists() else frozenset()
    return frozenset(texts)


def missing(test: str) -> str:
    """Why there is no such test; empty if there is one."""
    match = re.fullmatch(r"(?P<path>[^:]+)::(?P<name>\w+)(\[(?P<parameter>.+)\])?", test)
    if match is None:
        return "not a node id"
    path = ROOT / match["path"]
    if not path.is_file():
        return "no such file"
    if match["name"] not in functions(path):
        return "no such function"
    parameter = match["parameter"]
    return "" if parameter is None or parameter in constants(path) | KNOWN else "no such parameter"


def test_every_named_test_exists() -> None:
    assert len(NAMED) > 100
    assert {test: why for test in NAMED if (why := missing(test))} == {}


@pytest.mark.parametrize("part", ["path", "function", "parameter"])
def test_a_test_that_is_gone_is_noticed(part: str) -> None:
    test = next(test for test in NAMED if "[" in test)
    path, _, rest = test.partition("::")
    name, _, parameter = rest.partition("[")
    broken = {
        "path": f"{path[:-3]}x.py::{rest}",
        "function": f"{path}::{name}x[{parameter}",
        "parameter": f"{path}::{name}[x{parameter}",
    }
    assert missing(test) == ""
    assert missing(broken[part])
