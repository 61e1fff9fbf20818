"""Formation and publishes of stand-in servers in processes of their own, against the simulator's arithmetic:
``python benchmarks/fleet.py``.

Servers without a model, over sockets, at addresses of loopback; versions are small, so that requests count. What a
version costs one server is measured with one. The simulator's servers have a machine each, these share the cores: the
last row adds the CPU time of one server for each further one, divided by the cores.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
from machine import require_idle
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from areal_lora.launcher.simulation.cost_model import CostModel
from areal_lora.weight_sync.link.relays import MOST, REQUEST_S, RelayGroup, form_s
from tests.support.weight_sync import processes as ps

BUSY_LIMIT = 0.15
WARM, FORMATIONS = 5, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Milliseconds of forming all ``groups`` again, of each publish until its last acknowledgement, and of its probe;
    CPU milliseconds of all servers and of rank 0 for a formation, of all servers for a publish with its probe."""

    groups: Sequence[RelayGroup]
    forms: Sequence[float]
    publishes: Sequence[float]
    probes: Sequence[float]
    form_cpu: float
    rank_0_cpu: float
    publish_cpu: float


def measured(servers: int, publishes: int, most: int) -> Times:
    """Of so many ``servers`` in groups of at most ``most``."""
    tree = ps.Tree(range(servers), most=most)
    try:
        for _ in range(WARM):
            tree.end(tree.begin())
        children = [psutil.Process(server.process.pid) for server in tree.servers.values()]
        at_s = [_cpu_s(children)]
        own_s = [_cpu_s([psutil.Process()])]
        phases = [tree.begin().wait().phases for _ in range(publishes)]
        at_s.append(_cpu_s(children))
        own_s.append(_cpu_s([psutil.Process()]))
        for _ in range(FORMATIONS):
            tree.leader._formed.clear()
            tree.begin().wait()
        at_s.append(_cpu_s(children))
        own_s.append(_cpu_s([psutil.Process()]))
    finally:
        tree.close()
    publish_cpu, both_cpu = 1e3 * (at_s[1] - at_s[0]) / publishes, 1e3 * (at_s[2] - at_s[1]) / FORMATIONS
    rank_0_cpu = 1e3 * ((own_s[2] - own_s[1]) / FORMATIONS - (own_s[1] - own_s[0]) / publishes)
    return Times(
        groups=tree.leader._tree,
        forms=[1e3 * seconds for seconds in tree.formed_s[1:]],
        publishes=[each["ack"] for each in phases],
        probes=[each["probe"] for each in phases],
        form_cpu=both_cpu - publish_cpu,
        rank_0_cpu=rank_0_cpu,
        publish_cpu=publish_cpu,
    )


def _cpu_s(children: Sequence[psutil.Process]) -> float:
    return sum(sum(child.cpu_times()[:2]) for child in children)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--publishes", type=int, default=100)
    parser.add_argument("--most", type=int, default=MOST, help="largest group; smaller ones make relays")
    parser.add_argument("--force", action="store_true", help="run although the machine is busy")
    chosen = parser.parse_args()
    require_idle(BUSY_LIMIT, chosen.force)
    alone, cores = measured(1, chosen.publishes, chosen.most), len(os.sched_getaffinity(0))
    costs = CostModel(
        read_s=0.0, sampled_token_s=0.0, prompt_token_s=0.0, trained_token_s=0.0, prompt_tokens=0.0, answer_tokens=1.0,
        sigma=0.0, longest=1, nbytes=0, sources=1, link_s=0.0, tree=True,
        activate_s=median(alone.publishes) / 1e3 - REQUEST_S, probe_s=median(alone.probes) / 1e3 - REQUEST_S,
    )  # fmt: skip
    own_s = median(alone.forms) / 1e3 - form_s(alone.groups, costs.sources)
    table = Table("servers", "groups", "figure", "measured, ms", "p99, ms", "simulated, ms", "ratio")
    for servers in chosen.servers:
        times = measured(servers, chosen.publishes, chosen.most)
        requests_s, others = costs.requests_s(times.groups), (servers - 1) / cores / 1e3
        publish_s, probe_s = requests_s + costs.wire_s(times.groups) + costs.activate_s, requests_s + costs.probe_s
        formed_s = form_s(times.groups, costs.sources) + own_s
        both = [sum(pair) for pair in zip(times.publishes, times.probes, strict=True)]
        for figure, found, simulated_s in (
            ("form all groups", times.forms, formed_s),
            ("form, CPU of rank 0", [times.rank_0_cpu], form_s(times.groups, costs.sources)),
            ("publish", times.publishes, publish_s),
            ("probe", times.probes, probe_s),
            ("form, on shared cores", times.forms, formed_s + others * alone.form_cpu),
            ("publish and probe, on shared cores", both, publish_s + probe_s + others * alone.publish_cpu),
        ):
            ordered, simulated = sorted(found), 1e3 * simulated_s
            last = ordered[len(ordered) * 99 // 100]
            cells = (f"{median(ordered):.1f}", f"{last:.1f}", f"{simulated:.1f}", f"{median(ordered) / simulated:.2f}")
            table.add_row(str(servers), str(len(times.groups)), figure, *cells)
    print(
        f"one server: {alone.form_cpu:.1f} ms of CPU for a formation, {alone.publish_cpu:.1f} for a publish and probe"
    )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
