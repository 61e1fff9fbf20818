import subprocess
import sys
import time

import pytest
from train_speed import Measured
from tree_watch import TreeWatch, Usage
from versus import claims, report
from versus_runs import Run, Step, phases_of, read_trl

from tests.support.clocks import wait_until
from tests.support.obs.records import step_record

IDLE = Usage(at_s=[0.0, 100.0], cpu_s=[0.0, 150.0], peak_bytes=2**30, by_name={"trainer-0": 100.0})


def a_run(side, *, start_s, step_s, accuracy, lag=0.0, train_s=0.5, n=8):
    steps = [
        Step(at_s=start_s + i * step_s, wall_s=start_s + i * step_s, phases={"train": train_s}, lag=lag)
        for i in range(n)
    ]
    return Run(
        side=side, seed=1, samples_per_step=512, first_step_s=start_s, steps=steps, accuracy=accuracy, usage=IDLE
    )


TRAINED = [Measured(case="c", tokens=1, flops=1.0, cpu_s={"ours": [1.0], "peft": [1.5]}, wall_s={})]


def test_the_claims_are_medians_of_ratios_of_one_seed():
    ours = [a_run("ours", start_s=20.0, step_s=2.0, accuracy={0: 0.3, 2: 0.8, 4: 0.95}, lag=1.0) for _ in range(3)]
    trl = [a_run("trl", start_s=10.0, step_s=s, accuracy={0: 0.3, 4: 0.91, 8: 0.99}) for s in (4.0, 5.0, 12.0)]
    full = a_run("full", start_s=20.0, step_s=1.9, accuracy={})
    found = claims([{"ours": a, "full": full, "trl": b} for a, b in zip(ours, trl)], TRAINED)
    # version 4 exists when the fourth step has ended: 20 + 3 * 2 s against 10 + 3 * 5 s
    assert found == {
        "samples_vs_trl": 2.5,
        "time_to_090_vs_trl": round(26 / 25, 3),
        "train_phase_s": 0.5,
        "step_s": 2.0,
        "first_step_s": 20.0,
        "mean_lag": 1.0,
        "steps_vs_full_pacing": 0.95,
        "train_vs_transformers": 1.5,
    }


def test_a_goal_that_no_seed_reached_is_no_figure():
    ours = a_run("ours", start_s=1.0, step_s=1.0, accuracy={0: 0.95, 8: 0.5})
    assert ours.seconds_to(0.9) is None  # the base model does not count
    assert claims([{"ours": ours, "full": ours, "trl": ours}], TRAINED)["time_to_090_vs_trl"] is None


def test_rates_leave_the_first_steps_out():
    steps = [Step(at_s=t, wall_s=t, phases={}) for t in (50.0, 60.0, 70.0, 72.0, 74.0)]
    run = Run(side="x", seed=1, samples_per_step=10, first_step_s=50.0, steps=steps, accuracy={}, usage=IDLE)
    assert run.step_s == [2.0, 2.0]
    assert run.samples_per_s == 5.0
    assert run.cores == pytest.approx(1.5)


def test_trls_clock_stands_still_during_evaluations_and_its_cores_do_not():
    records = [{"kind": "eval", "step": 0, "at_s": 5.0, "accuracy": 0.3}]
    records += [
        {"kind": "step", "step": n, "at_s": 10.0 * n, "wall_s": 20.0 * n, "phases": {"generate": 6.0}}
        for n in range(1, 6)
    ]
    records += [{"kind": "eval", "step": 5, "at_s": 50.0, "accuracy": 0.92}]
    run = read_trl(records, seed=3, samples=100, usage=IDLE)
    assert run.seconds_to(0.9) == 50.0
    assert run.step_s == [10.0, 10.0]
    assert run.usage.cores(60.0, 100.0) == run.cores
    assert run.phases() == {"generate": 6.0}


def test_phases_of_a_recorded_step():
    step = step_record(
        step=0,
        version=0,
        time_s=1.0,
        step_s=4.0,
        wait_batch_s=1.0,
        train_s=2.0,
        publish_join_s=0.25,
        publish_pack_s=0.25,
    )
    phases = phases_of(step)
    assert sum(phases.values()) == step.step_s
    assert (phases["train"], phases["publish"], phases["other"]) == (2.0, 0.5, 0.5)


def test_a_process_and_its_child_are_watched():
    child = "import sys, time; block = bytearray(64 << 20); t = time.process_time()\n"
    child += "while time.process_time() - t < 1: pass\nsys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    started_s = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE)
    with TreeWatch(process.pid, started_s, every_s=0.1) as watch:
        wait_until(lambda: watch._peak > 64 << 20 and watch._cpu_s[-1] > 0.5, what="a look at the child's work")
        process.communicate()
    assert process.returncode == 0
    assert watch.usage.cpu_s[-1] < 5.0
    assert watch.usage.at_s == sorted(watch.usage.at_s)


def test_the_report_has_every_side_and_names_a_goal_that_was_missed(capsys):
    ours = a_run("ours", start_s=20.0, step_s=2.0, accuracy={0: 0.3, 4: 0.95})
    trl = a_run("trl", start_s=10.0, step_s=4.0, accuracy={0: 0.3, 4: 0.5})
    report([{"ours": ours, "full": ours, "trl": trl}])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "median of 1 seeds ours full trl" in lines
    assert "seconds to accuracy 0.9 26.00 26.00 never" in lines
    assert "trainer-0 100.0" in lines


def test_the_other_side_can_import_the_task():
    absent = ["zmq", "cryptography", "starlette", "uvicorn", "vllm", "megatron"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
        "import areal_lora.config.load, areal_lora.tasks.datasets, areal_lora.tasks.rewards"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
