"""Several runs on one page: names, curves in the same charts, keys that differ."""

from __future__ import annotations

from pathlib import Path

from areal_lora.config.recorded import write_config
from areal_lora.obs.metrics.reader import iter_metrics
from areal_lora.obs.report.page import RunPage
from areal_lora.obs.report.side_by_side import differing_keys, pages_of
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.fake_run import make_config, make_run
from tests.support.obs.three_adapters import make_three


def page_of(folder: Path) -> RunPage:
    page = RunPage(RunFolder.of(folder), lambda config: "")
    for record in iter_metrics(folder):
        page.add(record)
    return page


def test_a_key_has_the_values_of_all_runs() -> None:
    assert differing_keys([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 5, "b": 2}]) == {"b": [2, 3, 2], "a": [1, 1, 5]}


def test_one_run_is_its_own_page(tmp_path: Path) -> None:
    run = page_of(make_run(tmp_path, steps=3))
    assert pages_of([run]) == run.data()


def test_curves_of_runs_are_lines_of_the_same_charts(tmp_path: Path) -> None:
    first, second = page_of(make_run(tmp_path / "a", steps=3)), page_of(make_run(tmp_path / "b", steps=5, seed=1))
    config = second.config
    write_config(
        second.folder, config.model_copy(update={"run": config.run.model_copy(update={"seed": 8, "name": "b"})})
    )
    second = page_of(tmp_path / "b")
    data = pages_of([first, second])
    [reward] = [chart for chart in data.sections[0].charts if chart.title == "Reward"]
    assert [(line.name, len(line.x)) for line in reward.lines] == [("fake", 3), ("b", 5)]
    assert data.sections[0].clocks.keys() == {"fake", "b"}
    assert "<td>run.seed</td><td>7</td><td>8</td>" in data.body
    assert [section.id for section in data.sections] == ["runs", "run0-run", "run1-run"]
    assert all(f'id="{section.id}"' in data.body for section in data.sections)


def test_runs_of_one_name_are_numbered_and_adapters_named(tmp_path: Path) -> None:
    data = pages_of([page_of(make_three(tmp_path / "a")), page_of(make_three(tmp_path / "b", turns=7))])
    [staleness] = [chart for chart in data.sections[0].charts if chart.title == "Staleness"]
    starts = {line.name.rpartition(" ")[0] for line in staleness.lines}
    assert starts == {f"fake ({i}) {name}" for i in (1, 2) for name in ("alpha", "beta", "gamma")}
    assert data.sections[0].clocks.keys() == starts


def test_the_fake_configuration_is_one_of_a_run() -> None:
    assert differing_keys([make_config().model_dump(mode="json")] * 2) == {}
