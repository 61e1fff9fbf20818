"""The tables of real sizes are those of the estimate, and say what the page says about them."""

from __future__ import annotations

import pytest

from docs.tools import sizes
from docs.tools.sizes import SIZES, Size
from tests.support.paths import ROOT

LIMIT_GIB = 80.0


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_tables_are_up_to_date() -> None:
    assert sizes.TARGET.read_text(encoding="utf-8") == sizes.render(), "run make docs"


def test_every_size_fits_a_device_with_each_kind_of_recompute() -> None:
    rows = {name: [float(number) for number in numbers] for name, *numbers in sizes.memory_rows()}
    for kind in ("selective", "full", "offload"):
        assert max(rows[f"**sum**, `{kind}`"]) < LIMIT_GIB
        parts = ("base weights", "adapter weights and gradients", "optimizer moments", "publish and checkpoint")
        parts += ("packed versions", "process", "buffers", f"activations, `{kind}`")
        for i in range(len(SIZES)):
            assert sum(rows[part][i] for part in parts) == pytest.approx(rows[f"**sum**, `{kind}`"][i], abs=0.4)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_products_and_attention_bound_a_step(size: Size) -> None:
    row = sizes.times(size)
    work = row["products"] + row["attention"]
    others = ("launches, with it", "loss chunks", "weights read three times", "between ranks over NVLink")
    assert all(row[name] < work / 3 for name in others)
    assert row["launches, with it"] < work / 10
