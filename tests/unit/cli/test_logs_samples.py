"""Answers of a step, from a run folder."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from areal_lora.cli.app import main
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.rollout.conversations import ConversationFile, ConversationRecord
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.records import STEP
from tests.support.obs.rollouts import keep, step_rollouts


def test_the_answers_of_a_step_are_shown_with_its_drops_and_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["samples", str(tmp_path)]) == 64
    assert "there is no answer of a trained step" in capsys.readouterr().err
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        faults = {"scorer": "error: TypeError: x (reward.py:9)"}
        writer.write(msgspec.structs.replace(STEP, dropped={"scorer": 6}, retried={"scorer": 70}, faults=faults))
        keep(
            RunFolder(tmp_path),
            [step_rollouts(step, groups=1, n=2, texts=[f"no{step}", f"yes{step}"]) for step in (2, 3)],
        )
        # The writer of a running run has its files open.
        assert main(["samples", str(tmp_path), "--worst"]) == 0
        shown = capsys.readouterr().out
    assert shown.index("no3") < shown.index("yes3")
    assert shown.startswith("step 3 of toy: reward 0.500\ndropped: scorer 6\nretried: scorer 70\nfaults: scorer: 70")
    assert "TypeError: x (reward.py:9)" in shown
    assert "== toy, step 3, v2, v3: reward 1, gold 0\n-- prompt\nProblem 0 of step 3?\n-- answer\nyes3" in shown
    assert main(["samples", str(tmp_path), "--step", "2"]) == 0
    assert "yes2" in capsys.readouterr().out
    assert main(["samples", str(tmp_path), "--step", "9"]) == 64
    assert "choose among steps 2 to 3" in capsys.readouterr().err


def test_texts_of_models_and_tenants_do_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    text = "\x1b]52;c;Yg==\x07 \x9b2J"
    said = {"time": 0.0, "adapter": "math", "sample": 0, "evaluation": False, "reward": 1.0, "requests": []}
    ConversationFile(RunFolder(tmp_path)).write(ConversationRecord(**said, uid="1", detail=text, tokens=[]))
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(msgspec.structs.replace(STEP, retried={"scorer": 1}, faults={"scorer": f"error: {text}"}))
        keep(RunFolder(tmp_path), [step_rollouts(3, groups=1, n=1, texts=[text])])
        assert main(["samples", str(tmp_path)]) == 0
        assert main(["conversations", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\\x1b]52;c;Yg==\\x07 \\x9b2J") == 3, "the answer, the fault, the conversation"
    assert all(c == "\n" or c.isprintable() for c in shown)
