"""Formation, publishes and changes of a fleet of real processes, against the simulator's arithmetic:
``python benchmarks/fleet.py``.

Servers without a model, over sockets, at addresses of loopback; versions are small, so that requests count. What a
formation and a version cost is measured with one server; what more servers add is the simulator's, scaled for each
figure to what the first fleet measured on this machine. Where servers share the cores, the CPU time of each further
one, divided by the cores, is added. Then servers join, leave and are killed in the middle of transfers, relays too;
every version is compared bit for bit on every server.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import psutil
from machine import require_idle
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from areal_lora.launcher.simulation.cost_model import CostModel
from areal_lora.launcher.simulation.simulate import without_version
from areal_lora.weight_sync.link.relays import CONNECT_S, MOST, REQUEST_S, RelayGroup, form_s, relay_tree, workers_of
from tests.support.weight_sync import processes as ps

BUSY_LIMIT = 0.15
ONE_BUCKET_MIB, BUCKET_MIB = 1.0, ps.BUCKET_MIB
WARM, FORMATIONS, CALIBRATION = 5, 20, 4  # so many times as many with one server
EVENTS = ("join", "leave", "death", "death of a relay")
COSTS = CostModel(
    read_s=0.0, sampled_token_s=0.0, prompt_token_s=0.0, trained_token_s=0.0, prompt_tokens=0.0, answer_tokens=1.0,
    sigma=0.0, longest=1, nbytes=0, sources=1, link_s=0.0, tree=True, activate_s=0.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cpu:
    """Milliseconds of rank 0 and of one server."""

    rank_0: float
    server: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Milliseconds of forming all ``groups`` again, and of each publish with its probe; CPU of one of each."""

    groups: Sequence[RelayGroup]
    forms: Sequence[float]
    publishes: Sequence[float]
    form_cpu: Cpu
    publish_cpu: Cpu


def opened(servers: int, most: int) -> ps.Tree:
    """A fleet that has published; its servers are looked for only on request."""
    tree = ps.Tree(range(servers), most=most)
    tree.leader.roster.watcher._stop.set()
    for _ in range(WARM):
        tree.end(tree.begin())
    return tree


def measured(servers: int, publishes: int, formations: int, most: int) -> Times:
    """Of so many ``servers`` in groups of at most ``most``. A version is one bucket: sending it takes no time."""
    ps.BUCKET_MIB = ONE_BUCKET_MIB
    tree = opened(servers, most)
    try:
        children = [psutil.Process(server.process.pid) for server in tree.servers.values()]
        start = _cpu(children)
        phases = [tree.begin().wait().phases for _ in range(publishes)]
        published = _cpu(children)
        for _ in range(formations):
            tree.leader._formed.clear()
            tree.begin().wait()
        formed = _cpu(children)
    finally:
        tree.close()
    publish = Cpu(*((b - a) / publishes for a, b in zip(start, published, strict=True)))
    both = [(b - a) / formations for a, b in zip(published, formed, strict=True)]
    return Times(
        groups=tree.leader._tree,
        forms=[1e3 * seconds for seconds in tree.formed_s[1:]],
        publishes=[each["ack"] + each["probe"] for each in phases],
        form_cpu=Cpu(both[0] - publish.rank_0, both[1] - publish.server),
        publish_cpu=publish,
    )


def _cpu(children: Sequence[psutil.Process]) -> tuple[float, float]:
    """Milliseconds of this process, and on average of the ``children``, up to now."""
    return 1e3 * time.process_time(), 1e3 * fmean(sum(child.cpu_times()[:2]) for child in children)


def form_ms(groups: Sequence[RelayGroup], alone: Times) -> float:
    """Simulated milliseconds that forming ``groups`` takes longer than with one server: all of it is rank 0's."""
    return 1e3 * (form_s(groups, COSTS.sources) - form_s(alone.groups, COSTS.sources))


def publish_ms(groups: Sequence[RelayGroup], alone: Times) -> float:
    """Likewise, of a publish and its probe."""
    return 2e3 * (COSTS.requests_s(groups) - COSTS.requests_s(alone.groups))


@dataclass(frozen=True, slots=True)
class Figure:
    """Milliseconds ``measured``, with one server (``alone``), and that more servers ``add`` by the simulator."""

    name: str
    measured: Sequence[float]
    alone: float
    add: float

    def scale(self) -> float:
        """How much more the servers added than simulated."""
        return (median(self.measured) - self.alone) / self.add if self.add else 1.0


FORM, PUBLISH = "form, CPU of rank 0", "publish and probe, CPU of rank 0"


def compared(times: Times, alone: Times) -> list[Figure]:
    n, cores = sum(map(workers_of, times.groups)), len(os.sched_getaffinity(0))
    forms, publishes = form_ms(times.groups, alone), publish_ms(times.groups, alone)
    peers = 1e3 * (max(map(workers_of, times.groups)) - 1) * CONNECT_S
    others = (n - 1) / cores
    form, publish = times.form_cpu, times.publish_cpu
    shared_form = forms + others * (alone.form_cpu.server + peers)
    shared_publish = publishes + others * alone.publish_cpu.server
    return [
        Figure(FORM, [form.rank_0], alone.form_cpu.rank_0, forms),
        Figure("form, CPU of a server", [form.server], alone.form_cpu.server, peers),
        Figure(PUBLISH, [publish.rank_0], alone.publish_cpu.rank_0, publishes),
        Figure("publish and probe, CPU of a server", [publish.server], alone.publish_cpu.server, float(n > 1)),
        Figure("form, on shared cores", times.forms, median(alone.forms), shared_form),
        Figure("publish and probe, on shared cores", times.publishes, median(alone.publishes), shared_publish),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One ``event``: servers told to connect and CPU milliseconds of rank 0, each also simulated; milliseconds."""

    event: str
    told: int
    would: int
    cpu: float
    simulated: float
    ms: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds of rank 0's CPU for a formation with one server, and scales of what more servers add."""

    form: float
    forms: float
    requests: float


def change(tree: ps.Tree, event: str, plain_ms: float, alone: Times, costs: Costs, rng: random.Random) -> Change:
    """Let it happen to the fleet during its next version, which all servers that remain must serve.

    A version without it takes rank 0 ``plain_ms`` of CPU.
    """
    before, name = tree.leader._tree, ""
    relays = {group.relay.name for group in before if group.relay}
    if event == "join":
        tree.start(len(tree.servers))
    else:
        name = rng.choice(sorted(relays if event == EVENTS[3] else tree.endpoints.keys() - relays))
    if event == "leave":
        tree.servers[name].ask("leave")
    tree.leader.roster.watcher.look()
    killed = name if event in EVENTS[2:] else ""
    if killed:
        tree.servers[name].pipe.send(("pause",))
    cpu_s = time.process_time()
    job = tree.begin()
    if killed:
        assert tree.servers[name].answer() == "midway"
        os.kill(tree.servers[name].process.pid, ps.signal.SIGKILL)
    began_s = time.monotonic()
    report = job.wait()
    ms, cpu = 1e3 * (time.monotonic() - began_s), 1e3 * (time.process_time() - cpu_s)
    tree.end(job)
    told = set().union(*tree.told)
    gone = {tree.endpoints.pop(name)} if name else set()
    assert list(report.lost) == ([name] if killed else []), report.lost
    assert {server.name for server in report.servers} == set(tree.endpoints)
    broken = without_version(before, gone) if killed else set()
    after = relay_tree(report.servers, before, tree.leader._most)
    intact = {group for group in before if broken.isdisjoint({*group.members, group.relay})}
    forming = [group for group in after if group not in intact]
    would = {server for group in forming for server in (*group.members, group.relay)} - {None}
    would |= {g.relay for g in before if g.relay} - {g.relay for g in after} - gone  # relays that end relaying
    requests_s = len(report.servers) * REQUEST_S + (COSTS.requests_s(before) if killed else 0.0)  # pings; first attempt
    simulated = plain_ms + costs.requests * 1e3 * requests_s + costs.form + costs.forms * form_ms(forming, alone)
    return Change(event=event, told=len(told), would=len(would), cpu=cpu, simulated=simulated, ms=ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--publishes", type=int, default=100)
    parser.add_argument("--most", type=int, default=MOST, help="largest group; smaller ones make relays")
    parser.add_argument("--changes", type=int, default=5, help="of each kind, in groups of at most 8")
    parser.add_argument("--force", action="store_true", help="run although the machine is busy")
    chosen = parser.parse_args()
    require_idle(BUSY_LIMIT, chosen.force)
    out = Console(width=120)
    alone = measured(1, CALIBRATION * chosen.publishes, CALIBRATION * FORMATIONS, chosen.most)
    out.print(f"one server: a formation {alone.form_cpu}, a publish and probe {alone.publish_cpu} ms")
    table = Table("servers", "groups", "figure", "measured, ms", "p99, ms", "simulated, ms", "ratio", "scale")
    scales = dict[str, float]()
    for servers in sorted(chosen.servers):
        times = measured(servers, chosen.publishes, FORMATIONS, chosen.most)
        for figure in compared(times, alone):
            ordered, scale = sorted(figure.measured), scales.setdefault(figure.name, figure.scale())
            p50, p99 = median(ordered), ordered[len(ordered) * 99 // 100]
            simulated = figure.alone + scale * figure.add
            cells = (f"{p50:.1f}", f"{p99:.1f}", f"{simulated:.1f}", f"{p50 / simulated:.2f}", f"{scale:.2f}")
            table.add_row(str(servers), str(len(times.groups)), figure.name, *cells)
    costs = Costs(alone.form_cpu.rank_0, scales[FORM], scales[PUBLISH])
    out.print(table)
    seed = int(os.environ.get("AREAL_LORA_SEED", random.randrange(10**6)))
    ps.BUCKET_MIB = BUCKET_MIB  # several: a server is killed between two
    rng, tree, changes = random.Random(seed), opened(max(chosen.servers), 8), list[Change]()
    try:
        for _ in range(chosen.changes):
            cpu_s = time.process_time()
            for _ in range(WARM):
                tree.begin().wait()
            plain_ms = 1e3 * (time.process_time() - cpu_s) / WARM
            changes += [change(tree, event, plain_ms, alone, costs, rng) for event in EVENTS]
    finally:
        tree.close()
    table = Table("event", "told to connect", "simulated", "CPU of rank 0, ms", "simulated, ms", "ratio", "p50, ms")
    for event in EVENTS:
        those = [each for each in changes if each.event == event]
        cpu, simulated = fmean(c.cpu for c in those), fmean(c.simulated for c in those)
        told, would = fmean(c.told for c in those), fmean(c.would for c in those)
        cells = (f"{cpu:.1f}", f"{simulated:.1f}", f"{cpu / simulated:.2f}", f"{median(c.ms for c in those):.0f}")
        table.add_row(event, f"{told:.1f}", f"{would:.1f}", *cells)
    out.print(table)
    print(f"seed {seed}: {len(changes)} versions during changes, all served bit for bit by all servers that remained")


if __name__ == "__main__":
    main()
