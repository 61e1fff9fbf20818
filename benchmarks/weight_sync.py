"""How long a publish takes, against the wire's limit and the usual ways: ``python benchmarks/weight_sync.py``.

One trainer process and real rollout servers (vLLM with dummy base weights) on this machine. Everything
is measured in one run and interleaved; ratios are of medians. While generation is measured, the trainer
has the first half of the cores and the server the rest.

``--quick``      two minutes: fewer repeats, no growth tables
``--only PART``  ``publish``, ``generation`` or ``growth`` alone; claims of what was measured
``--veth [RATE]``  ``publish`` alone, between two network namespaces of one core each, at no more than RATE (1gbit)
``--json FILE``  the figures, with a flat object ``claims`` and ``environment`` beside it
``--force``      run although the machine is busy
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from machine import environment, require_idle
from rich.console import Console
from rich.table import Table
from sync_case import SOCKETS, Case, Tensors

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from areal_lora.checkpoint.adapter_io import save_peft
from areal_lora.run_folder.rendezvous import create_secret, read_secret
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.layout import plan_buckets
from areal_lora.weight_sync.link.broadcast_groups import GroupListener
from areal_lora.weight_sync.manifest import base_digest, trailer_part
from areal_lora.weight_sync.messages import ServerEndpoint
from areal_lora.weight_sync.trainer.leader import Leader
from areal_lora.weight_sync.trainer.publish_job import PublishJob
from areal_lora.weight_sync.trainer.publisher import Publisher
from tests.support.distributed.namespaces import Host, two_hosts
from tests.support.solo_exchange import SoloExchange

HERE = Path(__file__).resolve().parent
MOE_30B = Case(
    name="3k",
    layers=4,
    hidden=2048,
    experts=128,
    ffn=768,
    heads=32,
    kv_heads=4,
    head_dim=128,
    dtype="bfloat16",
    sequences=32,
)
MANY = Case(name="37k", layers=48, hidden=64, experts=128, ffn=16, heads=4, kv_heads=2, head_dim=32)
SMALL = Case(name="decode", layers=4, hidden=512, experts=128, ffn=192, heads=8, kv_heads=4, head_dim=64, rank=16)
BUCKET_MIB = 16
BUSY_LIMIT = 0.15
STEP_S = 1.0
CLONE_NEWNET = 0x40000000  # of sched.h
SHM = Path("/dev/shm")
OURS_WAY = "receivers read the source's memory"
SOCKETS_WAY = "ours over sockets (as between machines)"


class Server:
    """A child process, on ``cores`` only if there are any, on ``host`` or this one."""

    def __init__(self, folder: Path, index: int, cores: Sequence[int], host: Host | None) -> None:
        env = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, str(HERE / "sync_server.py"), str(folder), str(index)]
        if cores:
            command = ["taskset", "-c", ",".join(map(str, cores)), *command]
        if host is not None:
            command = ["ip", "netns", "exec", host.name, *command]
        address = "127.0.0.1" if host is None else host.ipv4
        self._log = (folder / f"server-{index}.log").open("wb")
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._folder, self._index = folder, index
        self.endpoint = ServerEndpoint(name="", host=address, admin_port=0, data_port=0, workers=1)

    def wait(self) -> Server:
        ready = json.loads(self._line())
        self.endpoint = ServerEndpoint(
            name=f"server-{self._index}",
            host=self.endpoint.host,
            admin_port=ready["admin_port"],
            data_port=0,
            workers=1,
        )
        return self

    def call(self, do: str, *args: object) -> Any:
        self.send(do, *args)
        return self.answer()

    def send(self, do: str, *args: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, "args": args}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        return json.loads(self._line())

    def rss_bytes(self) -> int:
        """Of the engine's process, which receives and holds the slots."""
        return max(p.memory_info().rss for p in psutil.Process(self._process.pid).children(recursive=True))

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            log = self._folder / f"server-{self._index}.log"
            raise SystemExit(f"the benchmark's server ended: {first_error(log.read_text(errors='replace'))}")
        return line


def first_error(log: str) -> str:
    """The first exception in a server's log, else its last line: what comes later only follows from it."""
    lines = [line for line in log.splitlines() if line.strip() and " WARNING " not in line]
    errors = [found[0] for line in lines if (found := re.search(r"[\w.]+(Error|Exception): .+", line))]
    return (errors or lines[-1:] or ["it wrote nothing"])[0]


class Setup:
    """A case with its servers, its adapters' tensors and a publisher; ``hosts`` are the trainer's and the servers'."""

    def __init__(self, case: Case, root: Path, receivers: int, cores: Sequence[int], hosts: Sequence[Host]) -> None:
        self.bind, there = ("127.0.0.1", None) if not hosts else (hosts[0].ipv4, hosts[1])
        self.case = case
        self._model = case.write_model(root / "model")
        config = case.config(root / "runs", self._model, there.ipv4 if there else self.bind)
        folder = config.run_folder.path
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(config.model_dump_json())
        create_secret(config.run_folder)
        self.secret = read_secret(config.run_folder)
        self.servers = [Server(folder, i, cores, there) for i in range(receivers)]
        self.specs = [case.spec(i, self._model) for i in range(case.adapters)]
        self.tensors = [Tensors(case, spec, seed=i) for i, spec in enumerate(self.specs)]
        self._digest = base_digest(self._model)
        self._run, self._weight_sync = config.run.name, config.weight_sync
        self._versions = [-1] * case.adapters
        for server in self.servers:
            server.wait()
        self.publisher = self.make_publisher(self.servers)

    def make_publisher(self, servers: Sequence[Server], backend: str = "gloo") -> Publisher:
        config = self._weight_sync.model_copy(update={"bucket_mib": BUCKET_MIB})
        leader = Leader(run=self._run, secret=self.secret, servers=[s.endpoint for s in servers], config=config)
        return Publisher(
            run=self._run,
            config=config,
            exchange=SoloExchange(),
            leader=leader,
            secret=self.secret,
            backend=backend,
            bind=self.bind,
        )

    def begin(self, adapter: int = 0, publisher: Publisher | None = None) -> PublishJob:
        """Pack the next version and begin its publish, as a trainer does at the end of a step."""
        self._versions[adapter] += 1
        name, version = self.specs[adapter].name, self._versions[adapter]
        tensors = self.tensors[adapter]
        return (publisher or self.publisher).publish(
            ref=AdapterRef(name=name, version=version),
            layout=tensors.layout,
            pack=tensors.pack,
            parent=AdapterRef(name=name, version=version - 1) if version else None,
            base_digest=self._digest,
            probe=None,
        )

    def publish(self, adapter: int = 0, publisher: Publisher | None = None) -> tuple[float, dict[str, float]]:
        """(milliseconds from before packing to the last acknowledgement, phases). Waits, as for a late publish."""
        began = time.perf_counter()
        report = self.begin(adapter, publisher).wait()
        return (time.perf_counter() - began) * 1e3, report.phases

    def publish_over(self, backend: str) -> tuple[float, dict[str, float]]:
        """A publish by a publisher of its own, after two that are not measured: groups, layouts and memory are there.

        Servers are members of one publisher's groups at a time.
        """
        publisher = self.make_publisher(self.servers, backend)
        try:
            self.publish(publisher=publisher), self.publish(publisher=publisher)
            return self.publish(publisher=publisher)
        finally:
            publisher.close()

    def close(self) -> None:
        self.publisher.close()
        for server in self.servers:
            server.stop()


def halves(cores: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Disjoint parts for trainer and servers; both get the only core where there is one."""
    middle = max(1, len(cores) // 2)
    return cores[:middle], cores[middle:] or cores


@contextmanager
def running(case: Case, receivers: int = 1, pinned: bool = False, hosts: Sequence[Host] = ()) -> Iterator[Setup]:
    """``pinned``: this process, the trainer, has the first half of the cores and the servers the others."""
    cores = os.sched_getaffinity(0)
    first, last = halves(sorted(cores)) if pinned else ((), ())
    with tempfile.TemporaryDirectory(prefix="areal-lora-bench-") as root:
        setup = Setup(case, Path(root), receivers, last, hosts)
        if first:
            os.sched_setaffinity(0, first)
        try:
            yield setup
        finally:
            os.sched_setaffinity(0, cores)
            setup.close()


class Baselines:
    """The limit and the two usual ways, on a group of their own to the same worker."""

    def __init__(self, setup: Setup) -> None:
        self._server, self._case = setup.servers[0], setup.case
        tensors = setup.tensors[0]
        self._spec = setup.specs[0]
        # Real values: untouched zero pages would be read from the cache and flatter the limit.
        self._flat = torch.randint(0, 256, (tensors.nbytes,), dtype=torch.uint8)
        self._whole = tensors.whole()
        self._names = [(name, list(t.shape)) for name, t in self._whole.items()]
        listener = GroupListener(
            source=0,
            bind=setup.bind,
            receivers=["a worker"],
            bucket_bytes=1 << 30,
            backend="gloo",
            timeout_s=60.0,
            secret=setup.secret,
        )
        endpoint = base64.b64encode(msgspec.msgpack.encode(listener.endpoint)).decode()
        self._server.call("bench_join", endpoint, setup.secret, self._server.endpoint.host)
        self._group = listener.accept()

    def raw(self) -> float:
        self._server.call("bench_raw", self._flat.numel())
        time.sleep(0.005)  # the receiver's thread has posted its receive
        began = time.monotonic()
        self._group.start(self._flat, began + 60).wait()
        sent = time.monotonic()
        return (max(self._server.call("bench_raw_end"), sent) - began) * 1e3

    def usual(self) -> float:
        began = time.perf_counter()
        self._server.send("bench_usual", self._names, self._case.dtype, self._spec.rank, self._spec.alpha)
        for tensor in self._whole.values():
            flat = tensor.detach().cpu().view(torch.uint8).view(-1)
            self._group.start(flat, time.monotonic() + 60).wait()
        self._server.answer()
        return self._forget((time.perf_counter() - began) * 1e3)

    def file(self) -> float:
        folder = SHM / f"areal-lora-bench-{os.getpid()}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            began = time.perf_counter()
            save_peft(folder, self._spec, self._whole, self._spec.base_model)
            self._server.call("bench_file", str(folder))
            return self._forget((time.perf_counter() - began) * 1e3)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        self._group.close()

    def _forget(self, ms: float) -> float:
        """Give the slot back to the product, outside of what was measured."""
        self._server.call("bench_forget")
        return ms


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds over the repeats."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(min(values), statistics.median(values), float(np.percentile(values, 99)))

    def __str__(self) -> str:
        return f"{self.low:.1f} / {self.middle:.1f} / {self.high:.1f}"


def compare(case: Case, repeats: int, console: Console, hosts: Sequence[Host] = ()) -> dict[str, Any]:
    """All variants, interleaved, on one server."""
    with running(case, pinned=bool(hosts), hosts=hosts) as setup:
        ways = Baselines(setup)
        rss = setup.servers[0].rss_bytes()
        phases: list[dict[str, float]] = []

        def ours() -> float:
            total, measured = setup.publish_over("gloo")
            phases.append(measured)
            return total

        variants: dict[str, Callable[[], float]] = {
            "raw broadcast": ways.raw,
            "ours": ours,
            SOCKETS_WAY: lambda: setup.publish_over(SOCKETS)[0],
            "usual way": ways.usual,
            "file way": ways.file,
        }
        ours()  # slots touched
        grown = setup.servers[0].rss_bytes() - rss
        phases.clear()
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(repeats):
            for name, run in variants.items():
                times[name].append(run())
        ways.close()
        tensors = setup.tensors[0]
        wire = tensors.nbytes + sum(end - start for start, end in map(trailer_part, tensors.layout.shards))
        spreads = {name: Spread.of(values) for name, values in times.items()}
        table = Table(
            title=f"{case.name}: {case.names:,} tensors, {tensors.nbytes / 2**20:.1f} MiB unique, rank {case.rank}, "
            f"{case.dtype}; {repeats} repeats",
            title_justify="left",
        )
        table.add_column("way")
        table.add_column("ms (min / p50 / p99)", justify="right")
        table.add_column("of the limit", justify="right")
        table.add_column("ours is faster by", justify="right")
        limit, mine = spreads["raw broadcast"].middle, spreads["ours"].middle
        for name, spread in spreads.items():
            table.add_row(name, str(spread), f"{limit / spread.middle:.2f}", f"{spread.middle / mine:.1f}x")
        console.print(table)
        console.print(f"  raw broadcast: over sockets; ours: as on this machine, which is to say {OURS_WAY}")
        middle = {name: statistics.median(p.get(name, 0.0) for p in phases) for name in phases[0]}
        console.print("  phases, p50 ms: " + ", ".join(f"{k} {v:.2f}" for k, v in middle.items()))
        console.print(
            f"  between machines {wire:,} bytes, {wire / tensors.nbytes - 1:.2%} above the unique ones; "
            f"{sum(len(plan_buckets(s, BUCKET_MIB << 20)) for s in tensors.layout.shards)} buckets; "
            f"engine process grew by {grown / 2**20:.0f} MiB at the first publishes"
        )
        return {
            "case": case.name,
            "tensors": case.names,
            "unique_bytes": tensors.nbytes,
            "wire_bytes": wire,
            "ms": {name: [s.low, s.middle, s.high] for name, s in spreads.items()},
            "phases_ms": middle,
            "rss_growth_bytes": grown,
            "of_limit": limit / mine,
            "of_limit_sockets": limit / spreads[SOCKETS_WAY].middle,
            "vs_usual": spreads["usual way"].middle / mine,
            "vs_file": spreads["file way"].middle / mine,
        }


def generation(case: Case, seconds: float, console: Console) -> dict[str, Any]:
    """Tokens per second without and with publishes, trainer and server on cores of their own.

    Four windows of ``seconds``: quiet; a step and a publish a second, which the next step waits for; publishes
    without a pause, each waited for at once; quiet.
    """
    with running(case, pinned=True) as setup:
        server = setup.servers[0]
        setup.publish()
        setup.publish()
        server.call("bench_watch")
        # All on one version: requests that last longer than a publish would hold every slot.
        server.call("stream", case.sequences, f"{setup.specs[0].name}@v1")
        time.sleep(10.0)  # contexts of all lengths
        marks = [time.monotonic()]
        time.sleep(seconds)
        marks.append(time.monotonic())
        beside, holds = _stepping(setup, seconds)
        marks.append(time.monotonic())
        awaited = []
        while time.monotonic() < marks[-1] + seconds:
            awaited.append(setup.publish())
        marks.append(time.monotonic())
        time.sleep(seconds)
        marks.append(time.monotonic())
        steps = np.array(server.call("bench_steps"))
        finished = server.call("quiet")
    rates, gaps = [], []
    for begin, end in pairwise(marks):
        inside = steps[(steps[:, 0] >= begin) & (steps[:, 0] < end)]
        rates.append(inside[:, 1].sum() / (end - begin))
        gaps.append(np.diff(inside[:, 0]) * 1e3)
    publishes = [phases for _, phases in awaited] + beside
    commits = [phases["commit"] for phases in publishes]
    trainer, serving = (len(part) for part in halves(sorted(os.sched_getaffinity(0))))
    table = Table(
        title=f"generation, {case.sequences} sequences, {len(publishes)} publishes; "
        f"trainer on {trainer}, server on {serving} cores",
        title_justify="left",
    )
    for column in ("", "tokens/s", "of quiet", "ms between steps (p50 / p99 / max)"):
        table.add_column(column, justify="right" if column else "left")
    quiet = statistics.mean((rates[0], rates[3]))
    names = ("before", "a publish a second", "no pause between publishes", "after")
    for name, rate, gap in zip(names, rates, gaps, strict=True):
        spread = " / ".join(f"{x:.1f}" for x in (*np.percentile(gap, [50, 99]), gap.max()))
        table.add_row(name, f"{rate:.0f}", f"{rate / quiet:.2f}", spread)
    console.print(table)
    busy, spread = Spread.of([t for t, _ in awaited]), Spread.of([phases["ack"] for phases in beside])
    hold = Spread.of(holds)
    console.print(
        f"  publish while generating {busy} ms where the trainer waits, {spread} ms where it does not; "
        f"each held a step for {hold} ms\n"
        f"  commit p99 {np.percentile(commits, 99):.2f} ms; "
        f"finished {finished}; re-prefilled tokens {int(steps[:, 2].sum())}"
    )
    return {
        "cores": [trainer, serving],
        "tokens_per_s": rates,
        "step_gap_ms": [[*np.percentile(g, [50, 99]), g.max()] for g in gaps],
        "publishes": len(publishes),
        "publish_ms": [busy.low, busy.middle, busy.high],
        "publish_beside_steps_ms": [spread.low, spread.middle, spread.high],
        "hold_ms": [hold.low, hold.middle, hold.high],
        "commit_p99_ms": float(np.percentile(commits, 99)),
        "tokens_during_ratio": rates[2] / quiet,
        "tokens_a_publish_a_second_ratio": rates[1] / quiet,
        "aborted": sum(n for reason, n in finished.items() if reason not in ("length", "stop")),
        "reprefilled": int(steps[:, 2].sum()),
    }


def _stepping(setup: Setup, seconds: float) -> tuple[list[dict[str, float]], list[float]]:
    """Steps of ``STEP_S`` for ``seconds``: phases of each publish, and milliseconds that the next step waited."""
    phases, holds = [], []
    until, handle = time.monotonic() + seconds, setup.begin()
    while time.monotonic() < until:
        time.sleep(STEP_S)
        began = time.perf_counter()
        phases.append(handle.wait().phases)
        holds.append((time.perf_counter() - began) * 1e3)
        handle = setup.begin()
    handle.wait()
    return phases, holds


def growth(repeats: int, console: Console) -> dict[str, Any]:
    """How the cost grows: p50 of a whole publish, each row against its first."""
    base = replace(MANY, name="growth", layers=12, adapters=1)
    rows: dict[str, list[tuple[str, float, float]]] = {}

    def measure(kind: str, *cases: tuple[str, Setup, dict[str, Any]]) -> None:
        """All cases in turn, so that what disturbs the machine disturbs each."""
        times: dict[str, list[float]] = {label: [] for label, _, _ in cases}
        for round_ in range(-2, repeats):
            for label, setup, options in cases:
                took_ms = setup.publish(**options)[0]
                times[label] += [took_ms] if round_ >= 0 else []
        rows.setdefault(kind, []).extend(
            (label, setup.tensors[0].nbytes / 2**20, statistics.median(times[label])) for label, setup, _ in cases
        )

    def compared(kind: str, cases: dict[str, Case]) -> None:
        """A server for each case, all at once; those that are not published to stand still."""
        with ExitStack() as stack:
            setups = [(label, stack.enter_context(running(case)), {}) for label, case in cases.items()]
            measure(kind, *setups)

    layers = {n: replace(base, layers=n) for n in (12, 24, 48)}
    compared("tensors, bytes and layers", {f"{c.names:,} tensors ({n} layers)": c for n, c in layers.items()})
    compared(
        "experts at equal bytes",
        {
            f"{n} experts": replace(base, experts=n, ffn=base.ffn * 128 // n, hidden=64 * 128 // n, layers=24)
            for n in (8, 32, 128)
        },
    )
    compared("rank", {f"rank {n}": replace(base, rank=n) for n in (8, 16, 32)})
    with running(replace(base, adapters=8)) as setup:
        measure("served adapters", ("1 adapter served", setup, {}))
        for adapter in range(1, 8):
            setup.publish(adapter)
        measure("served adapters", ("8 adapters served", setup, {}))
    with running(base, receivers=3) as setup, ExitStack() as stack:
        setup.publisher.close()
        for n in (1, 2, 3):
            publisher = setup.make_publisher(setup.servers[:n])
            stack.callback(publisher.close)
            measure("receivers", (f"{n} receivers", setup, {"publisher": publisher}))
            publisher.close()
    table = Table(title=f"growth of a whole publish, {repeats} repeats", title_justify="left")
    for column in ("what", "MiB", "p50 ms", "against the first"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for kind, lines in rows.items():
        table.add_section()
        table.add_row(f"[b]{kind}")
        for label, size, middle in lines:
            table.add_row(f"  {label}", f"{size:.1f}", f"{middle:.1f}", f"{middle / lines[0][2]:.2f}x")
    console.print(table)
    return rows


def joined_hosts(stack: ExitStack, rate: str) -> Sequence[Host]:
    """Two hosts, each sending at ``rate`` (tc) if given; this process and its threads are on the first from here on."""
    hosts = stack.enter_context(two_hosts())
    for host in hosts if rate else ():
        shaped = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        subprocess.run(["tc", "-n", host.name, "qdisc", "add", "dev", "eth0", "root", *shaped], check=True)
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{hosts[0].name}", "rb") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    return hosts


def main() -> None:
    with ExitStack() as stack:
        measure_all(stack)


def measure_all(stack: ExitStack) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("publish", "generation", "growth"))
    parser.add_argument("--veth", nargs="?", const="", metavar="RATE")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--repeats", type=int)
    args = parser.parse_args()
    require_idle(BUSY_LIMIT, args.force)
    console = Console(highlight=False)
    torch.set_num_threads(1)
    repeats = args.repeats or (7 if args.quick else 15)
    result: dict[str, Any] = {"environment": environment()}
    hosts = () if args.veth is None else joined_hosts(stack, args.veth)
    parts = (
        ("publish",)
        if hosts
        else (args.only,)
        if args.only
        else ("publish", "generation") + (() if args.quick else ("growth",))
    )
    claims: dict[str, float] = {}
    if "publish" in parts:
        result["3k"] = compare(MOE_30B, repeats, console, hosts)
        result["37k"] = compare(MANY, max(3, repeats // 3) if args.quick else repeats, console, hosts)
        claims |= {
            # As it runs on this machine (receivers read the source's memory), and as between machines.
            "publish_vs_raw": min(result["3k"]["of_limit"], result["37k"]["of_limit"]),
            "publish_vs_raw_sockets": min(result["3k"]["of_limit_sockets"], result["37k"]["of_limit_sockets"]),
            "vs_usual_3k": result["3k"]["vs_usual"],
            "vs_usual_37k": result["37k"]["vs_usual"],
            "vs_file_3k": result["3k"]["vs_file"],
            "vs_file_37k": result["37k"]["vs_file"],
        }
    if "generation" in parts:
        made = result["generation"] = generation(SMALL, 5.0 if args.quick else 15.0, console)
        claims |= {
            "commit_p99_ms": made["commit_p99_ms"],
            "tokens_during_ratio": made["tokens_during_ratio"],
            "tokens_a_publish_a_second_ratio": made["tokens_a_publish_a_second_ratio"],
            "publish_busy_ms": made["publish_ms"][1],
            "publish_hold_ms": made["hold_ms"][1],
            "aborted": made["aborted"],
            "reprefilled": made["reprefilled"],
        }
    if "growth" in parts:
        result["growth"] = growth(repeats, console)
    result["claims"] = claims
    for name, value in result["claims"].items():
        console.print(f"  {name:24} {value:.3g}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
