"""The job script on a real slurmctld with several nodes.

The roles are shell scripts: this is about who runs where, who hears which signal, and what becomes of the job.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from threading import Lock

import psutil
import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.errors import ConfigError
from areal_lora.families.registry import known_config
from areal_lora.launcher.plan import JobPlan, make_plan
from areal_lora.launcher.slurm.job import BY_SLURM
from areal_lora.launcher.slurm.script import submit
from areal_lora.launcher.start import RunStart
from areal_lora.run_folder.events import RequeueEvent, count_restarts, read_events
from areal_lora.run_folder.paths import RunFolder
from tests.support.cli.command import forked_python
from tests.support.launcher.real_slurm import Slurm
from tests.support.paths import EXAMPLES, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
QWEN = "Qwen/Qwen3-30B-A3B"
# Two ranks of the trainer on each of two nodes, the controller on the first, two servers on the second.
LAYOUT = (
    "cluster.kind=slurm",
    "cluster.nodes=2",
    "cluster.devices_per_node=2",
    "trainer.world_size=4",
    "trainer.ep=2",
    "rollout.servers=2",
)
# Ranks beat once: without a heartbeat a failure ends the run.
UP = """\
NAME="$1"; R=$(echo "$*" | sed 's/.*--run-folder //; s/ --index.*//')
beat() { : > "$R/sessions/$AREAL_LORA_SESSION/heartbeats/$NAME"; }
LIFE=${SLURM_RESTART_COUNT:-0}
echo "up on $SLURMD_NODENAME with $SLURM_CPUS_ON_NODE CPUs in life $LIFE as $$"
beat
"""
# Once it is up a signal finds the trap set.
HEARS = f"""\
trap 'echo stopped in order; exit 0' TERM
{UP}
while true; do beat; sleep 0.1; done
"""
SLEEPS = "sleep 1000 & wait $!"
FIRST_LIFE = '[ "$LIFE" -gt 0 ] ||'
SLEEP_IN_FIRST_LIFE = f"{FIRST_LIFE} {SLEEPS}"
ENVIRONMENT = Lock()
"""Held by the case that changes this process's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    id: str
    folder: Path
    config: Config

    def log(self, name: str) -> str:
        """All that ``name`` has written so far, in all lives."""
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def kill(self, name: str) -> None:
        """SIGKILL to the process that ``name`` was in its newest start."""
        os.kill(int(re.findall(r"up on .* as (\d+)", self.log(name))[-1]), signal.SIGKILL)


def requeues(job: Job) -> list[RequeueEvent]:
    return [event for event in read_events(RunFolder(job.folder)) if isinstance(event, RequeueEvent)]


def planned(folder: Path, trainer: str, *overrides: str, server: str = HEARS) -> tuple[Config, JobPlan]:
    """A plan whose interpreters are shell scripts."""
    programs = {
        "trainer.python": f'set -- "trainer-$RANK" "$@"\n{UP}\n{trainer}',
        "rollout.python": f'set -- "server-${{!#}}" "$@"\n{server}',
        "cluster.controller_python": f'set -- controller-0 "$@"\n{HEARS}',
    }
    folder.mkdir(exist_ok=True)
    for name, text in programs.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    paths = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
    roles = [f"{name}={folder}/{name}" for name in programs]
    config = load_config(
        paths, [f"run.root={folder}", "run.name=job", *LAYOUT, *roles, f"model.path={QWEN}", *overrides]
    )
    return config, make_plan(config, Facts(hf_config=known_config(QWEN)))


def submitted(slurm: Slurm, folder: Path, trainer: str, *overrides: str, server: str = HEARS, **around: str) -> Job:
    """``around``: variables of an allocation that it is submitted in."""
    config, plan = planned(folder, trainer, *overrides, server=server)
    with ENVIRONMENT, pytest.MonkeyPatch.context() as patch:
        for name in ("SLURM_CONF", "PATH"):
            patch.setenv(name, slurm.environment[name])
        for name, value in around.items():
            patch.setenv(name, value)
        patch.setattr(sys, "executable", forked_python())  # of the supervisor
        with RunStart(config) as run:
            return Job(id=submit(config, plan, run.prepare), folder=plan.run_folder.path, config=config)


def running(slurm: Slurm, job: Job, life: int = 0) -> Job:
    """Wait until the last processes of ``job`` are up."""
    ranks = [f"trainer-{rank}" for rank in range(job.config.trainer.world_size)]
    names = ("server-0", "server-1", "controller-0", *ranks)
    slurm.until("all roles", lambda: all(f"in life {life}" in job.log(name) for name in names))
    return job


def alone(case: Callable[[Slurm, Path], None], slurm: Slurm, folder: Path) -> None:
    """Jobs of a case that failed are cancelled, or the following ones would wait for their nodes."""
    try:
        case(slurm, folder)
    except BaseException:
        slurm.cancel({path.read_text().strip() for path in folder.rglob("job.id")})
        raise


@pytest.fixture(scope="module")
def out_of_time(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """slurmctld looks every half minute whose time is nearly up, so this job begins before the others."""
    return submitted(slurm, tmp_path_factory.mktemp("time"), SLEEP_IN_FIRST_LIFE, "cluster.slurm.time_limit=00:01:00")


def case_servers_of_a_second_job_join_leave_in_order_and_end_with_the_run(slurm: Slurm, tmp_path: Path) -> None:
    """Both commands as a user types them."""

    def areal_lora(*words: str) -> str:
        return slurm.run(forked_python(), "-m", "areal_lora", *words)

    wait = 'while [ ! -e "$R/go" ]; do sleep 0.1; done'
    job = running(slurm, submitted(slurm, tmp_path / "two jobs", wait, "cluster.bind=0.0.0.0"))
    [number] = re.findall(r"submitted Slurm job (\d+): 1 servers", areal_lora("add-servers", str(job.folder)))
    slurm.until("the added server", lambda: "up on" in job.log("server-2"))
    assert slurm.state(number) == "RUNNING"
    areal_lora("remove-servers", str(job.folder))
    ended = slurm.until_over(number)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), job.log(f"servers-{number}")
    assert "stopped in order" in job.log("server-2")
    [number] = re.findall(r"submitted Slurm job (\d+): 1 servers", areal_lora("add-servers", str(job.folder)))
    slurm.until("the next one", lambda: "up on" in job.log("server-3"))
    (job.folder / "go").touch()
    assert slurm.until_over(job.id)["JobState"] == "COMPLETED"
    ended = slurm.until_over(number)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), job.log(f"servers-{number}")
    assert "stopped in order" in job.log("server-3")


def case_every_task_is_on_its_node_and_the_trainers_end_ends_the_job(slurm: Slurm, tmp_path: Path) -> None:
    rank = 'echo "rank $RANK of $WORLD_SIZE on $SLURMD_NODENAME"'
    for name in ("controller-0", "server-0", "server-1"):
        rank += f'; until [ -e "$R/sessions/$AREAL_LORA_SESSION/heartbeats/{name}" ]; do sleep 0.1; done'
    job = submitted(slurm, tmp_path / "with a space", rank, "cluster.slurm.extra=[--export=NONE]")
    ended = slurm.until_over(job.id)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), job.log(f"job-{job.id}")
    nodes = slurm.run("scontrol", "show", "hostnames", ended["NodeList"]).split()
    for i in range(4):
        assert f"rank {i} of 4 on {nodes[i // 2]}\n" in job.log(f"trainer-{i}")
    for name, node in (("controller-0", nodes[0]), ("server-0", nodes[1]), ("server-1", nodes[1])):
        assert job.log(name).startswith(f"up on {node} with {int(ended['NumCPUs']) // 2} CPUs "), "all of the job's"
        assert "stopped in order" in job.log(name), "it was killed without having heard of it"
    session = job.folder / "sessions" / f"{job.id}-0"
    assert len(list(session.glob("steps/*/*.0"))) == 7
    assert (session / "secret").stat().st_mode & 0o777 == 0o600
    assert RunFolder.current(job.folder).secret.parent == session


def case_a_rank_that_ends_with_65_ends_the_job_with_65(slurm: Slurm, tmp_path: Path) -> None:
    rank = f'if [ "$RANK" = 2 ]; then sleep 1; exit 65; fi; {SLEEPS}'
    # With the second variable its steps would be refused.
    job = submitted(slurm, tmp_path, rank, SLURM_JOB_ID="1", SLURM_NTASKS_PER_GPU="1")
    ended = slurm.until_over(job.id)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "65:0", "0")
    assert "trainer-2 exited with code 65" in job.log(f"job-{job.id}")
    assert count_restarts(RunFolder(job.folder)) == {}


def case_killed_ranks_and_servers_start_again_in_the_allocation(slurm: Slurm, tmp_path: Path) -> None:
    """Until the trainer's budget of one restart is used up, which ends the job without a requeue."""
    job = running(slurm, submitted(slurm, tmp_path, SLEEPS, "run.max_restarts=1"))
    slurm.until("a rank", lambda: "up on" in job.log("trainer-3"))
    for name in ("server-1", "trainer-3"):
        job.kill(name)
        slurm.until(f"{name} again", lambda name=name: job.log(name).count("up on") == 2)  # type: ignore[misc]
    assert "---- server-1 starts again" in job.log("server-1")
    slurm.until("all ranks again", lambda: all(job.log(f"trainer-{i}").count("up on") == 2 for i in range(4)))
    assert [job.log(name).count("up on") for name in ("controller-0", "server-0")] == [1, 1]
    assert count_restarts(RunFolder(job.folder)) == {"server-1": 1, "trainer": 1}
    job.kill("trainer-0")
    ended = slurm.until_over(job.id)
    slurm.until("the end of all processes of the job", lambda: slurm.processes_of(job.id) == [])
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "70:0", "0")
    log = job.log(f"job-{job.id}")
    assert "server-1 was killed by SIGKILL; it is restarted in 1 s (1 of 1)" in log
    assert "trainer-3 was killed by SIGKILL; all trainer ranks are restarted in 1 s (1 of 1)" in log
    assert "trainer-0 was killed by SIGKILL and has no restarts left: the job ends as failed" in log


def case_a_silent_rank_is_found_with_the_stacks_of_all_nodes_and_starts_again(slurm: Slurm, tmp_path: Path) -> None:
    dumps = (
        "import faulthandler, os, pathlib, signal, sys, time; sys.path.insert(0, os.getcwd());"
        "from areal_lora.processes import stacks; from areal_lora.run_folder.paths import RunFolder;"
        "f = RunFolder(pathlib.Path(sys.argv[1])); stacks.install(f.stack_dump('trainer-0'));"
        "f.heartbeat('trainer-0').touch(); time.sleep(200)"
    )
    others = "while true; do beat; sleep 0.3; done"
    trainer = f'if [ $RANK = 0 ]; then exec {quote(sys.executable)} -c {quote(dumps)} "$R"; fi; {others}'
    job = submitted(slurm, tmp_path, trainer, "run.stall_s=10")
    slurm.until("the stall", lambda: count_restarts(RunFolder(job.folder)).get("trainer", 0) > 0)
    slurm.until("the second start", lambda: all(job.log(f"trainer-{i}").count("up on") > 1 for i in range(4)))
    assert "trainer-0 sent no heartbeat for" in job.log(f"job-{job.id}")
    stall = (job.folder / "stacks" / "stall-1.txt").read_text()
    assert "time.sleep" in stall or "<string>" in stall, stall
    assert not (job.folder / "sessions" / f"{job.id}-0" / "requeue-requested").exists(), "the shells were not signalled"
    slurm.run("scancel", job.id)
    slurm.until_over(job.id)


def case_a_setup_line_that_fails_ends_the_job_with_69(slurm: Slurm, tmp_path: Path) -> None:
    job = submitted(slurm, tmp_path, SLEEPS, "cluster.slurm.setup=[module load no-such-module]")
    ended = slurm.until_over(job.id)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "69:0", "0")
    assert "cluster.slurm.setup: module load no-such-module ended with code 127" in job.log(f"job-{job.id}")


def case_scancel_cancels(slurm: Slurm, tmp_path: Path) -> None:
    job = running(slurm, submitted(slurm, tmp_path, SLEEPS))
    slurm.run("scancel", job.id)
    ended = slurm.until_over(job.id)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")
    time.sleep(1.0)  # a requeue would show by now
    assert slurm.state(job.id) == "CANCELLED"
    assert "The job is COMPLETING and is not requeued by itself" in job.log(f"job-{job.id}")
    assert all("stopped in order" in job.log(name) for name in ("controller-0", "server-0", "server-1"))


def case_scancel_while_the_steps_stop_for_a_requeue_still_cancels(slurm: Slurm, tmp_path: Path) -> None:
    rank = "trap 'scancel $SLURM_JOB_ID; exit 0' TERM; while true; do sleep 0.1; done"
    job = running(slurm, submitted(slurm, tmp_path, rank))
    slurm.run("scancel", "--signal=USR1", "--batch", job.id)
    ended = slurm.until_over(job.id)
    assert "USR1 arrived: the steps are stopped" in job.log(f"job-{job.id}")
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), job.log(f"job-{job.id}")


def case_a_preempted_job_is_requeued_once_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    job = running(slurm, submitted(slurm, tmp_path, SLEEP_IN_FIRST_LIFE))
    nodes = slurm.job(job.id)["NodeList"]
    where = ("--partition=high", f"--nodelist={nodes}", "--exclusive")
    slurm.run("sbatch", *where, "--output=/dev/null", "--wrap=sleep 1")
    slurm.until_requeued(job.id)
    ended = slurm.until_over(job.id)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), job.log(f"job-{job.id}")
    event = requeues(job)[0]
    assert (event.without, event.why) == (1, BY_SLURM)
    assert job.log("server-0").count("stopped in order") == 2


def contents(folder: Path) -> dict[Path, bytes]:
    """All files but what srun itself logs (a stranger's bytes on its ports, when other tests use the loopback)."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("srun-"))
    return {path: path.read_bytes() for path in files}


def case_a_second_start_leaves_a_running_job_alone(slurm: Slurm, tmp_path: Path) -> None:
    job = running(slurm, submitted(slurm, tmp_path, SLEEPS))
    (job.folder / "sessions" / f"{job.id}-0" / "rendezvous" / "trainer-0.json").write_text("{}")
    before = contents(job.folder)
    dead = tmp_path / "slurm.conf"
    text = Path(slurm.environment["SLURM_CONF"]).read_text()
    dead.write_text(text.replace("SlurmctldPort=", "MessageTimeout=2\nSlurmctldPort=1"))
    unknown = rf"Slurm job {job.id} may still work in .*Unable to contact"
    with ENVIRONMENT, pytest.MonkeyPatch.context() as patch:
        for name in ("SLURM_CONF", "PATH"):
            patch.setenv(name, slurm.environment[name])
        with pytest.raises(ConfigError, match=f"Slurm job {job.id} works in"), RunStart(job.config):
            pass
        patch.setenv("SLURM_CONF", str(dead))
        with pytest.raises(ConfigError, match=unknown), RunStart(job.config):
            pass
    assert contents(job.folder) == before
    slurm.run("scancel", job.id)
    slurm.until_over(job.id)


def case_a_signal_before_anything_is_up_requeues_and_requeues_without_a_checkpoint_are_bounded(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = submitted(slurm, tmp_path, SLEEPS, "run.max_restarts=1")
    slurm.until_signals_are_kept(job.id)
    slurm.run("scancel", "--signal=USR1", "--batch", job.id)
    slurm.until_requeued(job.id)
    running(slurm, job, life=1)
    # Without --batch it reaches the steps only.
    slurm.run("scancel", "--signal=USR1", job.id)
    ended = slurm.until_over(job.id)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "70:0", "1")
    log = job.log(f"job-{job.id}")
    assert "The job is requeued: USR1 arrived (1 of 1 without a new checkpoint)" in log
    assert "USR1 arrived; the job ends as failed: the job would be requeued 2 times in a row" in log
    assert [(event.job, event.why, event.without) for event in requeues(job)] == [(job.id, "USR1 arrived", 1)]
    assert [path.name for path in (job.folder / "sessions").iterdir()] == [f"{job.id}-1"], "the old one is removed"


def case_a_lost_node_of_a_server_is_survived_and_one_of_the_trainer_requeues_the_job(
    slurm: Slurm, tmp_path: Path
) -> None:
    layout = ("cluster.nodes=4", "cluster.devices_per_node=1", "trainer.world_size=2")
    job = running(slurm, submitted(slurm, tmp_path, SLEEP_IN_FIRST_LIFE, *layout))
    nodes = slurm.run("scontrol", "show", "hostnames", slurm.job(job.id)["NodeList"]).split()
    try:
        slurm.lose_node(nodes[3])
        lost = f"server-1 was lost with node {nodes[3]}; it is not restarted, the other servers continue"
        slurm.until("the loss", lambda: lost in job.log(f"job-{job.id}"))
        assert (slurm.state(job.id), job.log("trainer-1").count("up on")) == ("RUNNING", 1)
        status = slurm.run(forked_python(), "-m", "areal_lora", "status", str(job.folder))
        for name, node in (("trainer-1", nodes[1]), ("server-0", nodes[2]), ("server-1", rf"{nodes[3]} \(lost\)")):
            assert re.search(rf"^{name} +{node} ", status, re.MULTILINE), status
        slurm.lose_node(nodes[1])
        slurm.until("the requeue", lambda: len(requeues(job)) == 1)
        assert requeues(job)[0].why.startswith(f"trainer-1 was lost with node {nodes[1]}")
    finally:
        for node in (nodes[1], nodes[3]):
            slurm.start_node(node)
    slurm.until_requeued(job.id)
    ended = slurm.until_over(job.id)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), job.log(f"job-{job.id}")


COMPONENTS = (
    "cluster.slurm.components=[{roles: [trainer], nodes: 2}, {roles: [rollout], nodes: 1}, "
    "{roles: [controller], nodes: 1}]"
)


def case_a_heterogeneous_job_has_each_role_in_its_component_and_mends_one(slurm: Slurm, tmp_path: Path) -> None:
    """A server that is killed restarts in its own component; the trainer's end ends all components."""
    rank = 'echo "rank $RANK on $SLURMD_NODENAME"; while [ ! -e "$R/go" ]; do sleep 0.1; done'
    job = submitted(slurm, tmp_path / "het", rank, COMPONENTS)
    running(slurm, job)
    slurm.until("all ranks", lambda: all("rank" in job.log(f"trainer-{i}") for i in range(4)))
    trainer, rollout, controller = (slurm.job(f"{job.id}+{i}")["NodeList"] for i in range(3))
    nodes = slurm.run("scontrol", "show", "hostnames", trainer).split()
    assert len({*nodes, rollout, controller}) == 4, "each component has nodes of its own"
    assert [job.log(f"trainer-{i}").split()[2] for i in range(4)] == [nodes[0], nodes[0], nodes[1], nodes[1]]
    for name, node in (("server-0", rollout), ("server-1", rollout), ("controller-0", controller)):
        assert f"up on {node} " in job.log(name)
    job.kill("server-1")
    slurm.until("a restarted server", lambda: job.log("server-1").count("up on") == 2)
    assert job.log("server-0").count("up on") == 1
    (job.folder / "go").touch()
    ended = [slurm.until_over(f"{job.id}+{i}") for i in range(3)]
    assert (ended[0]["JobState"], ended[0]["ExitCode"], ended[0]["Restarts"]) == ("COMPLETED", "0:0", "0")
    assert "stopped in order" in job.log("controller-0")


NODE = """\
import os
class Node:
    def reset(self, sample):
        return f"{os.environ['SLURMD_NODENAME']} {os.getpid()} {os.environ['SET_UP']}"
"""


def case_workers_of_environments_run_on_the_nodes_of_their_component(slurm: Slurm, tmp_path: Path) -> None:
    """A worker that is killed starts again on the next node, and no worker outlives the controller that leaves."""
    (tmp_path / "node.py").write_text(NODE)
    play = f"{quote(sys.executable)} {quote(str(ROOT / 'tests/support/launcher/node_workers.py'))}"
    controller = tmp_path / "controller"
    controller.write_text(f'#!/bin/bash\nset -- controller-0 "$@"\n{UP}\nPYTHONPATH=. {play} "$R"\necho left\n{HEARS}')
    controller.chmod(0o755)
    job = submitted(
        slurm,
        tmp_path,
        'while [ ! -e "$R/go" ]; do sleep 0.1; done',
        "cluster.slurm.components=[{roles: [trainer, rollout, controller], nodes: 2},"
        " {roles: [environment], nodes: 2}]",
        f"adapters.0.workflow={{kind: multi_turn, env: '{tmp_path}/node.py:Node', workers: 2}}",
        "cluster.slurm.setup=[export SET_UP=yes; echo set up]",
        f"cluster.controller_python={controller}",
    )

    def played() -> list[tuple[str, str, str]]:
        return re.findall(r"environment: (\S+) (\d+) (\S+)", job.log("controller-0"))

    slurm.until("both workers", lambda: len(played()) == 2)
    nodes = slurm.run("scontrol", "show", "hostnames", slurm.job(f"{job.id}+1")["NodeList"]).split()
    assert sorted(node for node, _, _ in played()) == nodes, job.log("controller-0")
    assert {word for _, _, word in played()} == {"yes"}
    os.kill(int(played()[0][1]), signal.SIGKILL)
    (job.folder / "killed").touch()
    slurm.until("the end of the workers", lambda: "left" in job.log("controller-0"))
    assert len(played()) == 4
    assert len({pid for _, pid, _ in played()}) == 3, "one is another process"
    slurm.until("the end of their processes", lambda: not any(psutil.pid_exists(int(pid)) for _, pid, _ in played()))
    (job.folder / "go").touch()
    assert slurm.until_over(job.id)["JobState"] == "COMPLETED"


def case_a_heterogeneous_job_is_requeued_as_a_whole(slurm: Slurm, tmp_path: Path) -> None:
    job = running(slurm, submitted(slurm, tmp_path, SLEEP_IN_FIRST_LIFE, COMPONENTS))
    slurm.run("scancel", "--signal=USR1", "--batch", job.id)
    slurm.until_requeued(job.id)
    ended = slurm.until_over(job.id)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), job.log(f"job-{job.id}")
    assert job.log("server-0").count("stopped in order") == 2
    assert "The job is requeued: USR1 arrived" in job.log(f"job-{job.id}")


CASES = {name: found for name, found in globals().items() if name.startswith("case_")}


@pytest.fixture(scope="module")
def outcomes(
    slurm: Slurm, out_of_time: Job, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    """Two cases at a time, beside the job that runs out of time, which fit on the nodes; the longest is the first."""
    with ThreadPoolExecutor(2) as threads:
        yield {
            name: threads.submit(alone, case, slurm, tmp_path_factory.mktemp(name[:30])) for name, case in CASES.items()
        }


@pytest.mark.parametrize("name", CASES)
def test_jobs(outcomes: dict[str, Future[None]], name: str) -> None:
    outcomes[name].result()


def test_a_job_whose_time_is_nearly_up_requeues_itself(slurm: Slurm, out_of_time: Job) -> None:
    job = out_of_time
    slurm.until("the requeue", lambda: slurm.job(job.id)["Restarts"] == "1")
    # Or the next life may be signalled, too. On a slow machine it may be over by now.
    slurm.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=00:10:00", check=False)
    slurm.until_requeued(job.id)
    ended = slurm.until_over(job.id)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), job.log(f"job-{job.id}")
    assert "The job is requeued: USR1 arrived" in job.log(f"job-{job.id}")
    assert job.log("server-1").count("stopped in order") == 2
    assert (job.folder / "job.id").read_text() == f"{job.id}\n"
