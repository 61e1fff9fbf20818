"""docs/en/your_own_task.md, as printed: parquet, other column names, chat, stop texts, a reward with named parts.

Real Megatron, real vLLM. Wrong input ends before any process starts.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import msgspec
import pytest

from areal_lora.library.runs import load_run
from areal_lora.obs.metrics.records import EvalRecord
from areal_lora.obs.report.inspector import RolloutFilter, RolloutIndex
from areal_lora.run_folder.paths import RunFolder
from tests.support.cli.command import programs
from tests.support.docs import Block, blocks
from tests.support.launcher.command import forked_roles
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PAGE = ROOT / "docs" / "en" / "your_own_task.md"
TRAIN = "areal-lora train --config mine.yaml --config more.yaml"
STEPS = 4  # the page says 12


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of the page in the environment that it asks for; those of this package are forks."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=580, check=False
    )


def take(block: Block, folder: Path) -> str:
    """Write the file that a block begins with the name of, or run its commands; returns what they print."""
    if block.language in ("python", "yaml"):
        (folder / block.text.partition("\n")[0].removeprefix("# ")).write_text(block.text)
        return ""
    done = shell(block.text, folder)
    assert done.returncode == 0, f"{block.text}{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def parts() -> list[Block]:
    return list(blocks(PAGE))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, parts: list[Block]) -> Path:
    """A folder with all that the page makes before it trains."""
    folder = tmp_path_factory.mktemp("own data")
    (folder / "examples").symlink_to(ROOT / "examples")
    programs(folder / "bin")
    for block in parts[: [block.text.strip() for block in parts].index(TRAIN)]:
        take(block, folder)
    return folder


def test_the_page_trains_in_two_commands(own: Path, parts: list[Block]) -> None:
    words = [block.text.split()[1] for block in parts if block.text.startswith("areal-lora ")]
    assert words == ["init", "train", "report", "eval"]
    _, train, report, evaluate = (block for block in parts if block.text.startswith("areal-lora "))
    done = shell(f"{train.text.strip()} run.steps={STEPS} {shlex.join(forked_roles(own))}", own)
    assert done.returncode == 0, done.stdout + done.stderr
    run = load_run(own / "runs" / "mine")
    assert len(run.steps) == STEPS
    for step in run.steps:
        named = step.reward_components
        assert set(named) == {"right", "brief", "ended"}
        assert named["brief"] < 0 < named["ended"]
        assert step.reward_mean == pytest.approx(sum(named.values()), abs=1e-5)
    assert [(e.name, e.order, e.version) for e in run.evals] == [
        (name, order, version) for version in (0, STEPS) for order, name in enumerate(("own", "hard"))
    ]
    first, several, last, _ = run.evals
    assert first.n == last.n == 32, "rows of level 3 are not kept"
    assert first.accuracy is not None
    assert first.accuracy > 0.1, "the chat template writes what the model was made with"
    for found in run.evals:
        assert found.accuracy is not None
        assert found.answer_tokens is not None
        assert found.truncated is not None
        expected = found.accuracy + 0.1 * (1 - found.truncated) - 0.001 * found.answer_tokens
        assert found.reward_mean == pytest.approx(expected, abs=1e-5), "rewards get token count and finish reason"
    assert (several.n, several.n_samples, several.unscored, several.interval) == (6, 4, 0, "wilson")
    assert list(several.pass_at) == [1, 2, 4]
    assert several.pass_at[1] == pytest.approx(several.accuracy)
    assert several.pass_at[1] <= several.pass_at[2] <= several.pass_at[4]
    assert several.majority is not None
    assert all(p.probe_mean_abs is not None and p.probe_mean_abs < 1e-4 for p in run.metrics.publishes)
    [rollout, *_] = RolloutIndex(RunFolder.of(run.folder)).rollouts(RolloutFilter(adapter=run.evals[0].adapter))
    assert rollout.prompt.startswith("Q: ")
    assert rollout.prompt.endswith(" How many now?\nA:")
    (run.folder / "report.html").unlink()
    take(report, own)
    assert "Reward by part" in (run.folder / "report.html").read_text()
    done = shell(f"{evaluate.text.strip()} --json", own)
    assert done.returncode == 0, done.stderr
    again, sampled = (msgspec.json.decode(line, type=EvalRecord) for line in done.stdout.splitlines())
    assert (again.name, again.version, again.n) == ("own", STEPS, 32)
    assert again.accuracy == pytest.approx(last.accuracy, abs=1 / 32), "the same greedy answers from stock vLLM"
    assert (sampled.name, sampled.n, sampled.n_samples, sampled.unscored) == ("hard", 6, 4, 0)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("adapters.policy.task.train=nowhere.jsonl", "adapters.0.task.train: nowhere.jsonl: no such file"),
        ("adapters.policy.task.columns.answer=gold", "no column 'gold' (fix: set task.columns.answer"),
        ("adapters.policy.task.columns.messages=problem", "is text"),
    ],
)
def test_wrong_input_is_one_line_before_anything_starts(own: Path, override: str, words: str) -> None:
    done = shell(f"{TRAIN} run.name=wrong {override}", own)
    assert done.returncode == 64, done.stdout + done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (own / "runs" / "wrong").exists()
