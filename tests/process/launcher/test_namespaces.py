"""The embedded job of a real Slurm on hosts of their own: trainer on one, servers on others, over a lossy link.

Login node and nodes are network, UTS and PID namespaces (`namespaces`) with a slurmctld and slurmd of their own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from areal_lora.launcher.plan import SERVER
from areal_lora.network.addresses import NODES_VARIABLE
from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.obs.metrics.records import RunMetrics
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import published_files, read_endpoint
from tests.support.clocks import seen
from tests.support.e2e import lenient_trainer
from tests.support.engine.vllm_ext import stand_in
from tests.support.launcher import real_slurm
from tests.support.launcher.command import plain_run
from tests.support.launcher.namespaces import Host, Link, hosts, measure, unavailable
from tests.support.launcher.real_slurm import PROCESSES, Slurm, started
from tests.support.sizes import NIGHTLY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "hosts can be made"),
]
DELAY_S, LOSS = 0.02, 0.01
END_S = 600.0


@pytest.fixture(autouse=True)
def with_slurm() -> None:
    if reason := real_slurm.why_not():
        pytest.skip(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    metrics: RunMetrics
    listeners: dict[str, set[str]]  # addresses by host
    addresses: dict[str, str]  # published, by process
    seconds: float  # from the submission to the end of the job


def run_spread(slurm: Slurm, root: Path, made: list[Host], *, ranks: int, steps: int, vllm: bool) -> Outcome:
    """Submit the job on the first host: trainer and controller on the second, a server on each other. It must end well.

    The launcher is the shipped one, as a user of a login node starts it.
    """
    command = plain_run(
        f"run.root={root}",
        "run.name=spread",
        f"run.steps={steps}",
        "cluster.kind=slurm",
        f"cluster.nodes={len(made) - 1}",
        f"cluster.devices_per_node={ranks}",
        "cluster.bind=0.0.0.0",
        f"rollout.servers={len(made) - 2}",
        f"trainer.world_size={ranks}",
        f"trainer.ep={ranks}",
        "adapters.gsm8k.sampling.prompts_per_step=16",
        "adapters.gsm8k.sampling.n_samples=4",
        "adapters.gsm8k.task.n_eval=8",
        "eval.every_steps=0",
        "rollout.max_num_seqs=16",
        "rollout.kv_cache_gib=0.05",
    )
    if not vllm:
        command += [
            f"rollout.python={stand_in.interpreter(root / 'server python')}",
            f"trainer.python={lenient_trainer.interpreter(root / 'trainer python')}",
            "adapters.gsm8k.algorithm.behaviour_cap=1e9",
            "weight_sync.probe_tolerance=1e9",
        ]
    unset = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP", NODES_VARIABLE)
    for name in unset:
        slurm.environment.pop(name, None)
    slurm.environment["OMP_NUM_THREADS"] = "1"
    began = time.monotonic()
    slurm.run(*command, timeout_s=280.0)
    path = root / "spread"
    job = (path / "job.id").read_text(encoding="ascii").strip()
    listeners: dict[str, set[str]] = {host.name: set() for host in made[1:]}
    addresses = dict[str, str]()
    while slurm.state(job) in ("PENDING", "CONFIGURING", "RUNNING"):
        assert time.monotonic() - began < END_S, said(path)
        for host in made[1:]:
            found = {address for program, address in host.listeners() if program not in PROCESSES}
            listeners[host.name] |= found
        folder = RunFolder.current(path)
        for role in ("trainer", "controller", SERVER):
            for index in published_files(folder, role):
                endpoint = read_endpoint(folder, role, index)
                if endpoint is not None:
                    addresses[f"{role}-{index}"] = endpoint.host
        time.sleep(0.5)
    ended = slurm.until_over(job)
    seconds = time.monotonic() - began
    how = (ended["JobState"], ended["ExitCode"], ended["Restarts"])
    assert how == ("COMPLETED", "0:0", "0"), f"{ended}\n{said(path)}"
    return Outcome(metrics=read_metrics(path), listeners=listeners, addresses=addresses, seconds=seconds)


def said(run: Path) -> str:
    return "\n".join(
        f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-25:])
        for path in sorted(run.glob("logs/*.log"))
    )


def check(outcome: Outcome, made: list[Host], steps: int) -> str:
    """All ended well, and no process listens where it was not told to. Figures."""
    trainer, *servers = made[1:]
    assert outcome.addresses == {
        "trainer-0": trainer.address,
        "controller-0": trainer.address,
        **{f"server-{i}": host.address for i, host in enumerate(servers)},
    }
    for host in made[1:]:
        # A server's own groups and engine use loopback, since they stay on its host.
        assert outcome.listeners[host.name] <= {host.address, "127.0.0.1"}, outcome.listeners
        assert host.address in outcome.listeners[host.name]
    metrics = outcome.metrics
    assert len(metrics.steps) == steps
    assert [p.servers for p in metrics.publishes] == [len(servers)] * (steps + 1), "a server was lost"
    publishes = [p.total_ms or 0.0 for p in metrics.publishes]
    wires = [p.phases_ms.get("wire") or 0.0 for p in metrics.publishes]
    size_mib = metrics.publishes[0].nbytes / 2**20
    figures = [
        f"{outcome.seconds:.0f} s from submission to end",
        f"{size_mib:.1f} MiB to {len(servers)} servers",
        f"publish p50 {median(publishes):.0f} ms (wire {median(wires):.0f}), worst {max(publishes):.0f}",
        f"first {publishes[0]:.0f} ms",
        f"step p50 {median(s.step_s for s in metrics.steps):.2f} s",
        f"retried {metrics.steps[-1].retried}",
    ]
    return "; ".join(figures)


def run_on_hosts(root: Path, n: int, delay_s: float, loss: float, *, ranks: int, steps: int, vllm: bool) -> Link:
    """Run a job on ``n`` hosts, one of them the login node; prints its figures."""
    with hosts(n, delay_s=delay_s, loss=loss) as made, started(made) as slurm:
        # Either end loses what its socket has no place for while it stands still.
        link = seen(lambda: measure(made[1], made[2]), lambda link: link.lost < 0.08)
        outcome = run_spread(slurm, root, made, ranks=ranks, steps=steps, vllm=vllm)
        print(f"\n{said_of(link)}; {check(outcome, made, steps)}")
    return link


def test_the_job_completes_over_a_link_with_latency_and_loss(tmp_path: Path) -> None:
    """slurmctld, two slurmd and the job on three hosts; the server is a stand-in, everything else is real."""
    link = run_on_hosts(tmp_path, 3, DELAY_S, LOSS, ranks=1, steps=2, vllm=False)
    assert link.rtt_ms >= 2e3 * DELAY_S, "the link is as fast as ever"
    assert link.lost > 0.0


@pytest.mark.skipif(not NIGHTLY, reason="real servers on four hosts: nightly")
@pytest.mark.parametrize(("delay_s", "loss"), [(0.0, 0.0), (DELAY_S, LOSS)], ids=["fast", "slow"])
def test_the_real_job_on_three_nodes(tmp_path: Path, delay_s: float, loss: float) -> None:
    run_on_hosts(tmp_path, 4, delay_s, loss, ranks=2, steps=10, vllm=True)


def said_of(link: Link) -> str:
    return f"round trip p50 {link.rtt_ms:.1f} ms, worst {link.worst_ms:.1f} ms, {link.lost:.1%} lost"
