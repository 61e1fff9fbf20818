"""Where runs differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_lora.cli import app
from areal_lora.config.recorded import write_config
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.fake_run import make_config, make_run
from tests.support.obs.three_adapters import make_three


def test_keys_that_differ_and_the_figures_of_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    first, second = make_run(tmp_path / "a run", steps=40, seed=1), make_run(tmp_path / "b", steps=20, seed=2)
    config = make_config()
    write_config(RunFolder(second), config.model_copy(update={"run": config.run.model_copy(update={"seed": 8})}))
    assert app.main(["compare", str(first), str(second), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["configuration"] == [["run.seed", 7, 8]]
    figures = {name: values for name, *values in said["figures"]}
    assert figures["steps"] == [40, 20]
    assert figures["accuracy, first"] == [0.25, 0.25]
    assert figures["accuracy, last"] == [pytest.approx(0.85), pytest.approx(0.85)]
    assert figures["median s of a step"] == [2.0, 2.0]
    assert app.main(["compare", str(first), str(second)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert str(second) in lines[0]
    assert any(line.split() == ["run.seed", "7", "8"] for line in lines)
    assert any(line.split() == ["steps", "40", "20"] for line in lines)


def test_a_run_without_steps_has_no_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "a", steps=0)
    assert app.main(["compare", str(folder), str(folder)]) == 0
    out = capsys.readouterr().out
    assert "(no key differs)" in out
    assert "median s of a step" in out


def test_a_table_of_three_runs_fits_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folders = [make_run(tmp_path / "a", steps=4), make_run(tmp_path / "b", steps=2), make_three(tmp_path / "c")]
    assert app.main(["compare", *map(str, folders)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split() == ["steps", "4", "2", "-"] for line in lines)
    assert app.main(["compare", str(folders[0])]) == 64
    assert "name two or more" in capsys.readouterr().err


def test_each_of_several_adapters_has_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = make_three(tmp_path / "a"), make_three(tmp_path / "b", turns=7)
    assert app.main(["compare", str(first), str(second), "--json"]) == 0
    figures = {name: values for name, *values in json.loads(capsys.readouterr().out)["figures"]}
    assert [figures[f"{name}: steps"] for name in ("alpha", "beta", "gamma")] == [[8, 3], [3, 2], [4, 2]]
    assert figures["alpha: accuracy, best"] == [0.75, 0.25]
    assert app.main(["compare", str(first), str(second), "--adapter", "alpha", "--json"]) == 0
    alone = {name: values for name, *values in json.loads(capsys.readouterr().out)["figures"]}
    assert alone == {name.removeprefix("alpha: "): row for name, row in figures.items() if name.startswith("alpha: ")}
    assert app.main(["compare", str(first), str(second), "--adapter", "delta"]) == 64
    assert "no adapter 'delta'" in capsys.readouterr().err


def test_one_adapter_beside_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, three = make_run(tmp_path / "a", steps=2), make_three(tmp_path / "b")
    assert app.main(["compare", str(one), str(three), "--json"]) == 0
    figures = {name: values for name, *values in json.loads(capsys.readouterr().out)["figures"]}
    assert (figures["steps"], figures["gamma: steps"]) == ([2, None], [None, 4])
