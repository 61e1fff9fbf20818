"""A run stopped in each phase: no process, port or shared memory remains after 10 s. The suite samples the phases;
all ways of stopping are in `tests/process/launcher/test_stops.py`.

Trainer, controller and launcher are real in all cases, the server is vLLM in two. In the others a stand-in answers:
what a stopped vLLM leaves behind is the same in every phase. All are forks, but for roles that end with their launcher.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_lora.config.sections.task import WordProblemsTask
from areal_lora.tasks.datasets import load_samples
from tests.support.e2e import lenient_trainer
from tests.support.e2e.elastic import made_up_roles
from tests.support.engine.vllm_ext import stand_in
from tests.support.launcher.command import configs, embedded_run, forked_roles
from tests.support.launcher.stops import GONE_S, Held, figures, marked, start, stop
from tests.support.sizes import sample

AT_ONCE, START_S = 2, 400.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Case:
    """``fault`` or the reward holds the run in the phase; ``seen`` is what a status line or a log then says."""

    phase: str
    way: str
    seen: str
    fault: str = ""
    vllm: bool = False


STEPS, N_EVAL = 2, 16
REWARD = f"""
import time
first = set({[sample.prompt for sample in load_samples(WordProblemsTask(n_eval=N_EVAL), "eval")]})
last = set()

def reward(completion, answer, prompt):
    if prompt in last:
        time.sleep(3600)
    if prompt in first:
        last.add(prompt)
    return float(completion.rpartition("####")[2].strip() == answer)
"""
EVERY = [
    Case("first publish", "SIGTERM", "fault: hang at server.receiving", "server.receiving:1:hang"),
    Case("waiting for rollouts", "launcher killed", "fault: hang at server.generating", "server.generating:9:hang"),
    Case("learning", "Ctrl-C twice", "fault: hang at trainer.learned", "trainer.learned:1:hang"),
    Case(
        "checkpoint being written",
        "launcher killed",
        "fault: hang at trainer.checkpoint.files_written",
        "trainer.checkpoint.files_written:2:hang",
    ),
    Case("publish under way", "SIGHUP", "fault: hang at trainer.publish_begun", "trainer.publish_begun:2:hang"),
    Case("closing", "Ctrl-C", f"waiting for the evaluation of .*gsm8k@v{STEPS}", vllm=True),
    Case("servers starting", "SIGHUP", "server-0.*loading the model", vllm=True),
    Case("loading the base", "SIGTERM", "fault: hang at trainer.loading", "trainer.loading:1:hang"),
]
CASES = sample(EVERY, 0, lambda case: (case.vllm,))


def said(folder: Path) -> str:
    """All status lines and logs."""
    paths = [*folder.glob("status/*-0.txt"), *folder.glob("logs/*.log")]
    return "\n".join(f"{path.stem} {line}" for path in paths for line in read(path).splitlines())


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""  # a status is being replaced


def stopped(root: Path, case: Case) -> tuple[float, int]:
    """Seconds until nothing was left, and the launcher's exit code."""
    name = case.phase.replace(" ", "-")
    environment = {"AREAL_LORA_TEST": uuid.uuid4().hex, "OMP_NUM_THREADS": "1"}
    (root / f"{name}.py").write_text(REWARD)
    reward = f"{{kind: function, path: '{root / name}.py:reward', timeout_s: 900}}"
    (root / f"{name}.yaml").write_text(f"adapters: [{{reward: {reward}}}]\n")
    if case.fault:
        environment["AREAL_LORA_FAULT"] = case.fault
    (own := root / f"{name} roles").mkdir()
    command = embedded_run(
        *configs(name, folder=root),
        f"run.root={root}",
        f"run.name={name}",
        f"run.steps={STEPS}",
        "trainer.world_size=1",
        "trainer.ep=1",
        "adapters.gsm8k.sampling.prompts_per_step=8",
        f"adapters.gsm8k.task.n_eval={N_EVAL}",
    )
    if case.vllm:
        command += forked_roles(own)
    elif case.way != "launcher killed":
        command += made_up_roles(own)
    else:  # a fork's parent is another one
        command += [
            f"rollout.python={stand_in.interpreter(own / 'server')}",
            f"trainer.python={lenient_trainer.interpreter(own / 'trainer')}",
            "weight_sync.probe_tolerance=1e9",
        ]
    _, _, module, *arguments = command
    process = start(module, arguments, environment, root / f"{name}.out")
    try:
        wait_for(lambda: re.search(case.seen, said(root / name)) is not None, process.poll, root / f"{name}.out")
        held = Held.by(environment)
        began_s = time.monotonic()
        stop(process, case.way)
        gone_s = held.gone_after_s(environment, began_s)
        return gone_s, process.wait(150)
    finally:
        process.kill()
        for left in marked(environment):
            left.kill()
        process.wait()


def wait_for(condition: Callable[[], bool], ended: Callable[[], int | None], output: Path) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert ended() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, int] | BaseException]:
    """What became of each case; they run side by side."""
    root = tmp_path_factory.mktemp("stops")

    def outcome(case: Case) -> tuple[float, int] | BaseException:
        try:
            return stopped(root, case)
        except (AssertionError, OSError) as error:
            return error

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return dict(zip([case.phase for case in CASES], threads.map(outcome, CASES), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.phase}, {case.way}")
def test_nothing_is_left(outcomes: dict[str, tuple[float, int] | BaseException], case: Case) -> None:
    outcome = outcomes[case.phase]
    if isinstance(outcome, BaseException):
        raise outcome
    gone_s, code = outcome
    assert gone_s < GONE_S
    assert code == (-9 if case.way == "launcher killed" else 130)


def test_seconds_until_nothing_is_left(outcomes: dict[str, tuple[float, int] | BaseException]) -> None:
    print(f"\n{figures([o[0] for o in outcomes.values() if isinstance(o, tuple)])}")
