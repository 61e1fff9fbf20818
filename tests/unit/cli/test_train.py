"""``areal-lora plan --simulate`` and the mismatch that ``doctor --run`` prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_lora.cli import app, train as verbs
from tests.support.obs.fake_run import make_run
from tests.support.paths import EXAMPLES


def test_a_plan_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    files = [f"--config={EXAMPLES / name}.yaml" for name in ("gsm8k_grpo_megatron_lora_moe", "embedded")]
    sizes = ["run.steps=4", "rollout.servers=2", "adapters.0.sampling.prompts_per_step=4"]
    assert app.main(["plan", "--simulate", "--gpus", "5", *files, *sizes]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    for part in (
        "by arithmetic",
        "steps per hour",
        "fit the KV cache",
        "staleness",
        "lost at half",
        "p99",
        "trainer ranks",
    ):
        assert part in out


def test_the_doctor_of_a_run_has_its_mismatch_by_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verbs, "examine", lambda *_, **__: [])
    run = str(make_run(tmp_path / "run", steps=4))
    assert app.main(["doctor", "--run", run, "--quick"]) == 0, capsys.readouterr().err
    first, staleness, numerics = capsys.readouterr().out.splitlines()[-3:]
    assert first == "mismatch of toy: 0.04 nats a token, KL 0.0008"
    assert staleness.split()[:5] == ["staleness", "3.00e-02", "6.00e-04", "75%", "75%"]
    assert "rollout.max_staleness" in staleness
    assert "behaviour.router_replay" in numerics
    assert app.main(["doctor", "--run", run, "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mismatch"] == {
        "toy": {"staleness": [0.03, 0.0006], "numerics": [0.01, 0.0002]}
    }


LONG = "x" * 300


@pytest.mark.parametrize("verb", ["plan", "sweep", "doctor", "train"])
def test_an_override_may_be_longer_than_a_path(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It reaches the check of its key: names of files have at most 255 bytes."""
    monkeypatch.chdir(EXAMPLES)
    words = ["--config=gsm8k_grpo_megatron_lora_moe.yaml", f"rollout.engine_arg={{x: {LONG}}}"]
    words = [words[0].partition("=")[2], words[1], "adapters.0.rank=[4,8]"] if verb == "sweep" else words
    assert app.main([verb, *words]) == 64
    assert "use rollout.engine_args" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["plan", LONG], "there is no such run"),
        (["plan", f"--config={LONG}"], "cannot be read"),
        (["plan", "--config=embedded.yaml", LONG], "is not an override"),
    ],
)
def test_a_text_that_is_too_long_for_a_path_is_none(
    words: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(EXAMPLES)
    assert app.main(words) == 64
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["plan", "--gpus", "4"], "--simulate"),
        (["plan", "--like", "nosuch"], "--simulate"),
        (["train", "--details"], "--dry-run"),
    ],
)
def test_an_option_of_another_one_is_refused_alone(
    words: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verbs, "start", lambda *_, **__: 0)
    files = [f"--config={EXAMPLES / name}.yaml" for name in ("gsm8k_grpo_megatron_lora_moe", "embedded")]
    assert app.main([*words, *files]) == 64
    assert f"belongs to {reason}" in capsys.readouterr().err.replace("they belong", "it belongs")
