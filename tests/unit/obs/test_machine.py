"""What processes use of their machines: measured on this one, of GPUs that are fakes, joined by role and node."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import msgspec
import psutil
import pytest

from areal_lora.obs import machine
from areal_lora.obs.machine import MachineUse, MachineWatch, Rounds, gpu_figures, joined
from areal_lora.obs.report.charts import Charts
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import STALE_S
from tests.support.clocks import wait_until
from tests.support.obs.nvml import FakeGpu, FakeNvml
from tests.support.obs.records import step_record
from tests.support.wheels import installed

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
    assert 0.05 < used["core_share"] * 10 < spent_s - 0.1, "its own alone"
    assert 0.19 < used["memory_gib"] - before["memory_gib"] < 0.3
    assert later["cpu_share"] * 10 * cpus < 0.1, "only what came since"


LOST = FakeGpu("GPU-d", 1.0, 1, lost=True)
GPUS = FakeNvml(
    (FakeGpu("GPU-a", 10.0, 50), FakeGpu("GPU-b", 30.0, 100, celsius=70), FakeGpu("MIG-c", 5.0, None), LOST)
)
FIRST = {"gpu_share": 0.5, "gpu_gib": 10.0, "gpu_watts": 300.5, "gpu_celsius": 40.0}
SECOND = {"gpu_share": 1.0, "gpu_gib": 30.0, "gpu_watts": 300.5, "gpu_celsius": 70.0}
SLICE = {"gpu_gib": 5.0, "gpu_watts": 300.5, "gpu_celsius": 40.0}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, {"0": FIRST, "1": SECOND, "2": SLICE, "3": {}}),
        ("0", {"0": FIRST}),
        ("GPU-b, 0", {"0": FIRST, "1": SECOND}),
        ("MIG-c", {"MIG-c": SLICE}),
        ("7,GPU-z,-1,1", {"1": SECOND}),
        ("", {}),
    ],
)
def test_gpus_are_those_that_the_process_sees(visible: str | None, expected: dict[str, dict[str, float]]) -> None:
    assert gpu_figures(GPUS, visible) == expected


def test_without_its_driver_a_machine_has_no_gpus() -> None:
    assert gpu_figures(replace(GPUS, driver=False), None) == {}


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The real ``pynvml``."""
    monkeypatch.syspath_prepend(str(installed("nvidia-ml-py==13.615.71")))
    yield importlib.import_module("pynvml")
    sys.modules.pop("pynvml")


def test_the_fake_has_the_functions_of_the_package(package: ModuleType) -> None:
    functions = [name for name in vars(FakeNvml) if name.startswith("nvmlDevice")]
    assert len(functions) == 8
    for name in functions:
        theirs = [*inspect.signature(getattr(package, name)).parameters]
        assert [*inspect.signature(getattr(FakeNvml, name)).parameters][1:] == theirs[
            : 2 if "Temp" in name or "Memory" in name else 1
        ], name
    assert package.NVML_TEMPERATURE_GPU == FakeNvml.NVML_TEMPERATURE_GPU
    assert isinstance(package.nvmlMemory_v2, int)
    assert issubclass(package.NVMLError, Exception)


def test_without_package_or_driver_there_is_one_line(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_driver() -> None:
        raise package.NVMLError(package.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(package, "nvmlInit", no_driver)
    with caplog.at_level("INFO"):
        assert machine.load_nvml() is None
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert machine.load_nvml() is None
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "nvidia-ml-py is missing" in caplog.text


def test_processes_of_a_role_on_a_node_are_one() -> None:
    uses = [
        MachineUse(role="server", node=node, figures={"cpu_share": 0.25, "kv_cache_share": kv}, gpus=gpus)
        for node, kv, gpus in (
            ("n1", 0.25, {"0": FIRST}),
            ("n1", 0.75, {"0": FIRST | {"gpu_share": 1.0}, "1": SECOND}),
            ("n2", 0.125, {"0": {"gpu_share": 0.125}}),
        )
    ] + [MachineUse(role="trainer", node="n1", figures={"cpu_share": 0.5})]
    found = joined(uses)
    assert found == {
        "machine/server/n1/cpu_share": 0.5,
        "machine/server/n1/kv_cache_share": 0.75,
        **{f"machine/server/n1/0/{name}": value for name, value in (FIRST | {"gpu_share": 0.75}).items()},
        **{f"machine/server/n1/1/{name}": value for name, value in SECOND.items()},
        "machine/server/n2/cpu_share": 0.25,
        "machine/server/n2/kv_cache_share": 0.125,
        "machine/server/n2/0/gpu_share": 0.125,
        "machine/trainer/n1/cpu_share": 0.5,
    }
    charts = Charts()
    charts.add(msgspec.structs.replace(step_record(step=0, version=0, time_s=1.0, adapter="a"), metrics=found))
    lines = {chart.title: [line.name for line in chart.lines] for chart in charts.data()}
    assert lines["CPUs"] == ["server/n1", "server/n2", "trainer/n1"]
    assert lines["GPU utilisation"] == ["server/n1/0", "server/n1/1", "server/n2/0"]
    assert lines["GPU power"] == ["server/n1/0", "server/n1/1"]


def test_many_nodes_are_three_tags() -> None:
    """A step's record of 512 servers stays as small as that of 16."""

    def uses(nodes: int) -> list[MachineUse]:
        return [MachineUse(role="server", node=f"n{i}", figures={"cpu_share": i / 1024}) for i in range(nodes)]

    assert len(joined(uses(machine.MAX_PLACES))) == machine.MAX_PLACES
    eight = {str(number): {"gpu_gib": float(number)} for number in range(8)}
    of_gpus = joined(MachineUse(role="server", node=f"n{i}", figures={}, gpus=eight) for i in range(3))
    assert of_gpus == {f"machine/server/{x}/gpu_gib": y for x, y in (("min", 0.0), ("mean", 3.5), ("max", 7.0))}
    assert joined(uses(513)) == {
        "machine/server/min/cpu_share": 0.0,
        "machine/server/mean/cpu_share": 0.25,
        "machine/server/max/cpu_share": 0.5,
    }


def test_a_record_has_all_rounds_since_the_one_before() -> None:
    """GPUs that work in one round of five; each record is taken after that round."""
    rounds, at = Rounds(), "machine/trainer/n1/0/"
    for peak_gib in (30.0, 20.0):
        for working in (0, 0, 0, 0, 1):
            use = {"gpu_share": float(working), "gpu_watts": 100.0 + 500 * working, "gpu_gib": peak_gib * (1 - working)}
            node = {"cpu_share": 0.5, "disk_free_gib": peak_gib - working}
            rounds.add(joined([MachineUse(role="trainer", node="n1", figures=node, gpus={"0": use})]))
        expected = {f"{at}gpu_share": 0.2, f"{at}gpu_watts": 200.0, f"{at}gpu_gib": peak_gib}
        found = rounds.take()
        assert found == pytest.approx(
            expected | {"machine/trainer/n1/cpu_share": 0.5, "machine/trainer/n1/disk_free_gib": peak_gib - 1}
        )
        assert rounds.take() == found, "a step that is shorter than a round"
    rounds.add({f"{at}gpu_share": 0.75})
    rounds.add({f"{at}gpu_share": 0.25, "machine/server/n2/cpu_share": 0.125})
    assert rounds.take() == {f"{at}gpu_share": 0.5, "machine/server/n2/cpu_share": 0.125}, "one that came later"


def test_extremes_are_those_of_known_figures() -> None:
    assert machine.EXTREMES.keys() < machine.FIGURES.keys()


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
    node = os.uname().nodename
    wait_until(lambda: f"machine/controller/{node}/cpu_share" in watch.rounds.take())
    for each in (controller, watch):
        each.stop()
    found = watch.rounds.take()
    assert found["machine/server/n1/sequences_running"] == 5.0
    assert found[f"machine/controller/{node}/sequences_outstanding"] == 7.0
    own = {
        f"machine/{role}/{node}/{name}"
        for role in ("controller", "trainer")
        for name in ("cpu_share", "core_share", "memory_gib")
    }
    of_one = {f"machine/controller/{node}/sequences_outstanding", f"machine/trainer/{node}/disk_free_gib"}
    assert found.keys() == own | of_one | {"machine/server/n1/sequences_running"}
    assert 0 < found[f"machine/trainer/{node}/disk_free_gib"] < shutil.disk_usage(tmp_path).total / 2**30
    assert ended not in watch._collect(time.monotonic() + 2 * STALE_S), "nothing has changed since"
