"""The job script on a real slurmctld with four nodes.

The roles are shell scripts: this is about who runs where, who hears which signal, and what becomes of the job.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.errors import ConfigError
from areal_lora.families.published import known_config
from areal_lora.launcher.plan import JobPlan, make_plan
from areal_lora.launcher.slurm import submit
from areal_lora.launcher.start import RunStart
from tests.support.launcher import real_slurm
from tests.support.launcher.real_slurm import Slurm
from tests.support.paths import EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
QWEN = "Qwen/Qwen3-30B-A3B"
# Two ranks of the trainer on each of two nodes, the controller on the first, two servers on the second.
LAYOUT = (
    "cluster.kind=slurm",
    "cluster.nodes=2",
    "trainer.world_size=4",
    "trainer.ep=2",
    "rollout.servers=2",
    "run.stop_grace_s=4",
)
HEARS = """
trap 'echo stopped in order; exit 0' TERM
echo "up on $SLURMD_NODENAME in life ${SLURM_RESTART_COUNT:-0}"
while true; do sleep 0.1; done
"""
FIRST_LIFE = '[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] ||'
SLEEP_IN_FIRST_LIFE = f"{FIRST_LIFE} exec sleep 60"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if reason := real_slurm.why_not():
        pytest.skip(reason)
    with real_slurm.started() as cluster:
        yield cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    id: str
    folder: Path
    config: Config

    def log(self, name: str) -> str:
        """All that ``name`` has written so far, in all lives."""
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""


def planned(folder: Path, trainer: str, *overrides: str) -> tuple[Config, JobPlan]:
    paths = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
    config = load_config(paths, [f"run.root={folder}", "run.name=job", *LAYOUT, *overrides])
    plan = make_plan(config, Facts(hf_config=known_config(QWEN)))
    scripts = {"trainer": trainer, "server": HEARS, "controller": HEARS}
    processes = tuple(replace(spec, argv=("bash", "-c", scripts[spec.role])) for spec in plan.processes)
    return config, replace(plan, processes=processes)


def submitted(slurm: Slurm, folder: Path, trainer: str, *overrides: str) -> Job:
    config, plan = planned(folder, trainer, *overrides)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SLURM_CONF", "PATH"):
            patch.setenv(name, slurm.environment[name])
        with RunStart(config) as run:
            return Job(id=submit(config, plan, run), folder=plan.run_folder.path, config=config)


def running(slurm: Slurm, job: Job, life: int = 0) -> Job:
    """Wait until the last processes of ``job`` are up."""
    names = ("server-0", "server-1", "controller-0")
    slurm.until("all roles", lambda: all(f"in life {life}" in job.log(name) for name in names))
    return job


@pytest.fixture(scope="module")
def out_of_time(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """slurmctld looks every half minute whose time is nearly up, so this job begins before the others."""
    return submitted(slurm, tmp_path_factory.mktemp("time"), SLEEP_IN_FIRST_LIFE, "cluster.slurm.time_limit=00:01:00")


@pytest.mark.usefixtures("out_of_time")
def test_every_task_is_on_its_node_and_the_trainers_end_ends_the_job(slurm: Slurm, tmp_path: Path) -> None:
    rank = 'echo "rank $RANK of $WORLD_SIZE on $SLURMD_NODENAME"; sleep 1'
    job = submitted(slurm, tmp_path, rank)
    ended = slurm.until_over(job.id)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), job.log(f"job-{job.id}")
    nodes = slurm.run("scontrol", "show", "hostnames", ended["NodeList"]).split()
    for i in range(4):
        assert job.log(f"trainer-{i}") == f"rank {i} of 4 on {nodes[i // 2]}\n"
    for name, node in (("controller-0", nodes[0]), ("server-0", nodes[1]), ("server-1", nodes[1])):
        assert job.log(name).startswith(f"up on {node} ")
        assert "stopped in order" in job.log(name), "it was killed without having heard of it"
    assert len(list((job.folder / "exits").glob("*.0"))) == 7


def test_a_rank_that_ends_with_65_ends_the_job_with_65(slurm: Slurm, tmp_path: Path) -> None:
    job = submitted(slurm, tmp_path, 'if [ "$RANK" = 2 ]; then sleep 1; exit 65; fi; exec sleep 60')
    ended = slurm.until_over(job.id)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "65:0", "0")
    assert "trainer-2 ended with code 65" in job.log(f"job-{job.id}")
    assert not (job.folder / "job.failures").exists()


def test_a_killed_rank_has_the_job_requeued_and_the_next_life_ends_well(slurm: Slurm, tmp_path: Path) -> None:
    job = submitted(slurm, tmp_path, f'{FIRST_LIFE} if [ "$RANK" = 1 ]; then kill -9 $$; else exec sleep 60; fi')
    slurm.until_requeued(job.id)
    ended = slurm.until_over(job.id)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), job.log(f"job-{job.id}")
    assert "trainer-1 ended with code 137; start 1 of 3 after a failure" in job.log(f"job-{job.id}")
    assert (job.folder / "job.failures").read_text() == "1\n"


def test_scancel_cancels(slurm: Slurm, tmp_path: Path) -> None:
    job = running(slurm, submitted(slurm, tmp_path, "exec sleep 60"))
    slurm.run("scancel", job.id)
    ended = slurm.until_over(job.id)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")
    time.sleep(1.0)  # a requeue would show by now
    assert slurm.state(job.id) == "CANCELLED"
    assert "is COMPLETING and is not requeued by itself" in job.log(f"job-{job.id}")
    assert all("stopped in order" in job.log(name) for name in ("controller-0", "server-0", "server-1"))


def test_scancel_while_the_steps_stop_for_a_requeue_still_cancels(slurm: Slurm, tmp_path: Path) -> None:
    job = running(slurm, submitted(slurm, tmp_path, "trap 'sleep 2; exit 0' TERM; while true; do sleep 0.1; done"))
    slurm.run("scancel", "--signal=USR1", "--batch", job.id)
    slurm.until("the signal", lambda: "USR1 arrived: the steps are stopped" in job.log(f"job-{job.id}"))
    slurm.run("scancel", job.id)
    ended = slurm.until_over(job.id)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), job.log(f"job-{job.id}")


def test_a_preempted_job_is_requeued_once_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    job = running(slurm, submitted(slurm, tmp_path, SLEEP_IN_FIRST_LIFE))
    nodes = slurm.job(job.id)["NodeList"]
    where = ("--partition=high", f"--nodelist={nodes}", "--exclusive")
    slurm.run("sbatch", *where, "--output=/dev/null", "--wrap=sleep 1")
    slurm.until_requeued(job.id)
    ended = slurm.until_over(job.id)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), job.log(f"job-{job.id}")
    assert not (job.folder / "job.failures").exists(), "a preemption is no failure"
    assert job.log("server-0").count("stopped in order") == 2


def test_a_second_start_leaves_a_running_job_alone(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = running(slurm, submitted(slurm, tmp_path, "exec sleep 60"))
    (job.folder / "rendezvous" / "trainer-0.json").write_text("{}")
    before = {path: path.read_bytes() for path in job.folder.rglob("*") if path.is_file()}
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm.environment[name])
    with pytest.raises(ConfigError, match=f"Slurm job {job.id} works in"), RunStart(job.config):
        pass
    dead = tmp_path / "slurm.conf"
    text = Path(slurm.environment["SLURM_CONF"]).read_text()
    dead.write_text(text.replace("SlurmctldPort=", "MessageTimeout=2\nSlurmctldPort=1"))
    monkeypatch.setenv("SLURM_CONF", str(dead))
    unknown = rf"Slurm job {job.id} may still work in .*Unable to contact"
    with pytest.raises(ConfigError, match=unknown), RunStart(job.config):
        pass
    assert {path: path.read_bytes() for path in job.folder.rglob("*") if path.is_file()} == before
    slurm.run("scancel", job.id)
    slurm.until_over(job.id)


def test_a_job_whose_time_is_nearly_up_requeues_itself(slurm: Slurm, out_of_time: Job) -> None:
    job = out_of_time
    slurm.until_requeued(job.id, timeout_s=90)
    ended = slurm.until_over(job.id)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), job.log(f"job-{job.id}")
    assert "The job is requeued: USR1 arrived" in job.log(f"job-{job.id}")
    assert job.log("server-1").count("stopped in order") == 2
    assert (job.folder / "job.id").read_text() == f"{job.id}\n"
