"""Answers of a step, from a run folder."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from areal_lora.cli.app import main
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.records import SAMPLE, STEP


def test_the_answers_of_a_step_are_shown_with_its_drops_and_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["samples", str(tmp_path)]) == 64
    assert "there is no answer of a trained step" in capsys.readouterr().err
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        faults = {"scorer": "error: TypeError: x (reward.py:9)"}
        writer.write(msgspec.structs.replace(STEP, dropped={"scorer": 6}, retried={"scorer": 70}, faults=faults))
        for step, reward in ((2, 1.0), (3, 0.75), (3, 0.25)):
            texts = {"prompt": "user\nq", "completion": f"a{reward}"}
            writer.write(msgspec.structs.replace(SAMPLE, step=step, reward=reward, **texts))
        # The writer of a running run has its files open.
        assert main(["samples", str(tmp_path), "--worst"]) == 0
        shown = capsys.readouterr().out
    assert shown.index("a0.25") < shown.index("a0.75")
    assert shown.startswith("step 3 of toy: reward 0.500\ndropped: scorer 6\nretried: scorer 70\nfaults: scorer: 70")
    assert "TypeError: x (reward.py:9)" in shown
    assert "== toy, step 3, v2, v3: reward 0.75" in shown
    assert main(["samples", str(tmp_path), "--step", "2"]) == 0
    assert "a1.0" in capsys.readouterr().out
    assert main(["samples", str(tmp_path), "--step", "9"]) == 64
    assert "choose among steps 2 to 3" in capsys.readouterr().err
