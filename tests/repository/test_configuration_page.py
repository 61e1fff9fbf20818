"""The generated reference is complete and up to date."""

from __future__ import annotations

import re

import pytest

from areal_lora.config import models
from areal_lora.errors import ExitCode
from docs.tools import configuration
from tests.support.paths import ROOT

PAGE = ROOT / configuration.TARGET


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == configuration.render(), "run make docs"


def test_every_key_is_on_the_page() -> None:
    page = configuration.render()
    for key in models.leaf_keys():
        assert f"| `{key.rpartition('.')[2]}` |" in page


def test_every_key_but_kind_has_a_meaning() -> None:
    bare = re.findall(r"^\| `(\w+)` \|.*\|  \|$", configuration.render(), re.M)
    assert set(bare) == {"kind"}


@pytest.mark.parametrize("page", ["configuration.md", "running.md"])
def test_every_exit_code_is_in_the_table(page: str) -> None:
    text = (ROOT / "docs" / "en" / page).read_text(encoding="utf-8")
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.M)} == {int(code) for code in ExitCode}
