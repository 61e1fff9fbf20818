"""The generated reference is complete and up to date."""

from __future__ import annotations

from pathlib import Path

from areal_lora.config import docs, schema

PAGE = Path(__file__).resolve().parents[2] / docs.TARGET


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == docs.render(), "run python -m areal_lora.config.docs"


def test_every_key_is_on_the_page() -> None:
    page = docs.render()
    for key in schema.leaf_keys():
        assert f"| `{key.rpartition('.')[2]}` |" in page
