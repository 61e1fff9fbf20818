"""The table of runs by algorithm, and the picture in the documentation."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from algorithm_curves import Curve, main, read, table

from areal_lora.config.sections.adapter import PRESETS
from tests.support.obs.fake_run import make_run
from tests.support.obs.three_adapters import make_three
from tests.support.paths import ROOT

PICTURE = ROOT / "docs" / "en" / "img" / "algorithm_curves.svg"
SVG = "{http://www.w3.org/2000/svg}"


def legend(text: str) -> list[str]:
    root = ElementTree.fromstring(text)
    return [str(t.text) for t in root.iter(f"{SVG}text") if t.get("class") == "legend"]


def test_a_row_for_each_run() -> None:
    curves = [
        Curve(label="opo", seed=2, accuracy={0: 0.25, 5: 0.5}, left_out=0.0),
        Curve(label="opo", seed=1, accuracy={0: 0.5}, left_out=0.0125),
        Curve(label="gpg", seed=1, accuracy={5: 0.75}, left_out=0.0),
    ]
    assert table(curves).splitlines()[2:] == [
        "| `gpg` | 1 |  | 0.750 | 0.00 % |",
        "| `opo` | 1 | 0.500 |  | 1.25 % |",
        "| `opo` | 2 | 0.250 | 0.500 | 0.00 % |",
    ]


def test_a_run_folder_is_read_and_several_adapters_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run", steps=10)
    curve = read(folder)
    assert curve.label == "grpo"
    assert max(curve.accuracy) <= 10
    main([str(folder)])
    assert f"| `grpo` | {curve.seed} |" in capsys.readouterr().out
    three = make_three(tmp_path / "three")
    with pytest.raises(ValueError, match="3 adapters"):
        read(three.path)


def test_the_picture_of_the_documentation_names_algorithms_of_its_table() -> None:
    page = (ROOT / "docs" / "en" / "results.md").read_text(encoding="utf-8")
    names = legend(PICTURE.read_text(encoding="utf-8"))
    assert "img/algorithm_curves.svg" in page
    assert len(names) == 8
    assert set(names) <= set(PRESETS)
    for name in names:
        assert re.search(rf"^\| `{name}` \| 0\.\d+ / 0\.\d+ \|", page, re.M), "both seeds are in the table"
