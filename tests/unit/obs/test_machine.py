"""What processes use of their machines: measured on this one, of GPUs that are fakes, joined by role and node."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from areal_lora.obs import machine
from areal_lora.obs.machine import MachineUse, MachineWatch, gpu_figures, joined
from areal_lora.obs.report.charts import Charts
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import STALE_S
from tests.support.clocks import wait_until
from tests.support.obs.nvml import FakeGpu, FakeNvml
from tests.support.obs.records import step_record

BURN = (
    "import sys, time\nx = bytearray(200 << 20)\nwhile time.process_time() < 0.2: pass\nprint(1, flush=True)\ninput()"
)


MEASURE = f"""
import json, subprocess, sys, time
from areal_lora.obs.machine import ProcessMeter

now = 0.0
meter = ProcessMeter(lambda: now)
found = [meter.figures()]
with subprocess.Popen([sys.executable, "-c", {BURN!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    for now in (10.0, 20.0):
        found.append(meter.figures())
    child.communicate(b"1")
print(json.dumps(found))
"""


def test_cpu_time_and_memory_are_those_of_the_process_and_its_descendants() -> None:
    """In a process of its own, which has no other descendants."""
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=250, check=True)
    before, used, later = json.loads(done.stdout)
    cpus = psutil.cpu_count() or 1
    spent_s = used["cpu_share"] * 10 * cpus  # in ticks of 10 ms, rounded down for each kind of time and process
    assert 0.25 < spent_s < 0.6, "0.1 s of its own and 0.2 s of the child's"
    assert 0.19 < used["memory_gib"] - before["memory_gib"] < 0.3
    assert later["cpu_share"] * 10 * cpus < 0.1, "only what came since"


GPUS = FakeNvml((FakeGpu("GPU-a", 10.0, 50), FakeGpu("GPU-b", 30.0, 100), FakeGpu("MIG-c", 5.0, None)))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, {"gpu_gib": 30.0, "gpu_share": 0.75}),
        ("0", {"gpu_gib": 10.0, "gpu_share": 0.5}),
        ("GPU-b, 0", {"gpu_gib": 30.0, "gpu_share": 0.75}),
        ("2", {"gpu_gib": 5.0}),
        ("7", {}),
        ("", {}),
    ],
)
def test_gpus_are_those_that_the_process_sees(visible: str | None, expected: dict[str, float]) -> None:
    assert gpu_figures(GPUS, visible) == expected


def test_processes_of_a_role_on_a_node_are_one() -> None:
    uses = [
        MachineUse(role="server", node=node, figures={"cpu_share": 0.25, "kv_cache_share": kv, "gpu_share": kv})
        for node, kv in (("n1", 0.25), ("n1", 0.75), ("n2", 0.125))
    ] + [MachineUse(role="trainer", node="n1", figures={"cpu_share": 0.5})]
    found = joined(uses)
    assert found == {
        "machine/server/n1/cpu_share": 0.5,
        "machine/server/n1/kv_cache_share": 0.75,
        "machine/server/n1/gpu_share": 0.5,
        "machine/server/n2/cpu_share": 0.25,
        "machine/server/n2/kv_cache_share": 0.125,
        "machine/server/n2/gpu_share": 0.125,
        "machine/trainer/n1/cpu_share": 0.5,
    }
    charts = Charts()
    charts.add(msgspec.structs.replace(step_record(step=0, version=0, time_s=1.0, adapter="a"), metrics=found))
    [cpus] = [chart for chart in charts.data() if chart.title == "CPUs"]
    assert [line.name for line in cpus.lines] == ["server/n1", "server/n2", "trainer/n1"]


def test_many_nodes_are_three_tags() -> None:
    """A step's record of 512 servers stays as small as that of 16."""

    def uses(nodes: int) -> list[MachineUse]:
        return [MachineUse(role="server", node=f"n{i}", figures={"cpu_share": i / 1024}) for i in range(nodes)]

    assert len(joined(uses(machine.MAX_NODES))) == machine.MAX_NODES
    assert joined(uses(513)) == {
        "machine/server/min/cpu_share": 0.0,
        "machine/server/mean/cpu_share": 0.25,
        "machine/server/max/cpu_share": 0.5,
    }


@pytest.mark.parametrize("name", machine.FIGURES)
def test_every_figure_has_a_chart(name: str) -> None:
    charts = Charts()
    charts.add(
        msgspec.structs.replace(
            step_record(step=0, version=0, time_s=1.0, adapter="a"), metrics={f"machine/server/n1/{name}": 0.5}
        )
    )
    assert any(line.name.startswith("server/n1") and line.y == [0.5] for c in charts.data() for line in c.lines)


def test_one_process_collects_what_all_wrote_until_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.statuses.mkdir(parents=True)
    monkeypatch.setattr(machine, "EVERY_S", 0.05)
    ended = MachineUse(role="server", node="n1", figures={"sequences_running": 5.0})
    (folder.statuses / "server-3.json").write_bytes(msgspec.json.encode(ended))
    controller = MachineWatch(folder, "controller", 0, figures=lambda: {"sequences_outstanding": 7.0})
    watch = MachineWatch(folder, "trainer", 0, collects=True)
    wait_until(lambda: len(watch.uses) == 3)
    for each in (controller, watch):
        each.stop()
    found = {use.role: use for use in watch.uses}
    assert found["server"] == ended
    assert found["controller"].figures["sequences_outstanding"] == 7.0
    assert found["trainer"].figures.keys() == {"cpu_share", "memory_gib"}
    assert ended not in watch._collect(time.monotonic() + 2 * STALE_S), "nothing has changed since"
