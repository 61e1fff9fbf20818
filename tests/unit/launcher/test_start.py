"""When a run with several adapters is finished, and what a start of it would do."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import cast

import pytest

from areal_lora.config.models import Config
from areal_lora.config.recorded import more_steps, steps_of
from areal_lora.launcher import start
from areal_lora.launcher.start import PreviousRun, RunStart, previous_run
from areal_lora.launcher.sweep import Sweep
from areal_lora.obs.report.summary import write_summary
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.three_adapters import make_three, three_config


def previous(tmp_path: Path) -> PreviousRun:
    folder = make_three(tmp_path / "x")
    write_summary(folder, wall_s=1.0, adapters={}, report_path=folder.report)
    found = previous_run(folder)
    assert found is not None
    return found


def with_steps(steps: dict[str, int]) -> Config:
    config = three_config()
    adapters = [adapter.model_copy(update={"steps": steps[adapter.name]}) for adapter in config.adapters]
    return config.model_copy(update={"adapters": adapters})


@pytest.mark.parametrize(
    ("steps", "finished"),
    [
        ({"alpha": 8, "beta": 3, "gamma": 4}, True),
        ({"alpha": 8, "beta": 8, "gamma": 4}, False),  # beta has failed after 3: a start tries again
        ({"alpha": 8, "beta": 3, "gamma": 5}, False),
        ({"alpha": 9, "beta": 1, "gamma": 1}, False),  # the sum is made, alpha's steps are not
        ({"alpha": 1, "beta": 1, "gamma": 1}, True),
    ],
)
def test_finished_is_that_every_adapter_has_made_its_own_steps(
    tmp_path: Path, steps: dict[str, int], finished: bool
) -> None:
    found = previous(tmp_path)
    assert (found.steps, found.steps_done) == ({"alpha": 8, "beta": 3, "gamma": 4}, 15)
    assert found.finished(with_steps(steps)) is finished


def test_a_run_without_a_summary_is_not_finished(tmp_path: Path) -> None:
    found = previous_run(make_three(tmp_path / "x"))
    assert found is not None
    assert found.steps == {"alpha": 0, "beta": 0, "gamma": 0}
    assert not found.finished(with_steps({"alpha": 1, "beta": 1, "gamma": 1}))


def test_more_steps_are_asked_for_where_each_adapter_has_them() -> None:
    config = three_config()
    assert steps_of(config) == {"alpha": 8, "beta": 8, "gamma": 4}
    made = {"alpha": 8, "beta": 3, "gamma": 4}
    assert more_steps(config, made) == ["run.steps=16", "adapters.gamma.steps=8"]
    own = ["adapters.alpha.steps=16", "adapters.beta.steps=6", "adapters.gamma.steps=8"]
    assert more_steps(with_steps(made), made) == own


@pytest.mark.parametrize("step", ["record_sweep", "begin_session"])
def test_a_start_that_a_full_disk_has_ended_is_made_again_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    whole = getattr(start, step)
    config, sweep = in_folder(tmp_path), cast(Sweep, None if step == "begin_session" else object())

    def half(folder: RunFolder, *rest: object) -> None:
        (folder.path / "half of it").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(start, step, half)
    with RunStart(config, sweep=sweep) as first, pytest.raises(OSError, match="No space left"):
        first.prepare()
    monkeypatch.setattr(start, step, whole)
    with RunStart(config) as again:
        again.prepare()
    assert (again.previous is not None, first.folder.secret.exists()) == (True, True)


def test_a_full_disk_at_the_first_file_leaves_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(start, "write_config", full)
    with RunStart(in_folder(tmp_path)) as first, pytest.raises(OSError, match="No space left"):
        first.prepare()
    assert list(first.folder.path.iterdir()) == []
    with RunStart(in_folder(tmp_path)) as again:
        assert again.previous is None


def in_folder(root: Path) -> Config:
    config = three_config()
    return config.model_copy(update={"run": config.run.model_copy(update={"root": root})})
