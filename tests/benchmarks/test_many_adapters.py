"""What ``benchmarks/many_adapters.py`` reads out of a run's records, on records written by hand."""

from __future__ import annotations

import many_adapters
import pytest

from areal_lora.obs.metrics.records import EvalRecord, RunMetrics, StepRecord
from tests.support.obs.records import step_record


def record(i: int, adapter: str, step: int) -> StepRecord:
    return step_record(
        adapter=adapter,
        step=step,
        version=step,
        time_s=2.0 * i,
        wait_batch_s=0.5,
        publish_join_s=0.1,
        publish_pack_s=0.1,
    )


ORDER = "ababbaabab" + "bbb"  # a ends first


@pytest.fixture
def metrics() -> RunMetrics:
    steps = [record(i, name, ORDER[: i + 1].count(name)) for i, name in enumerate(ORDER)]
    evals = [EvalRecord(adapter=n, version=v, step=v, accuracy=v / 10, n=10) for n in "ab" for v in (0, 5)]
    return RunMetrics(steps=steps, evals=evals)


def test_the_window_is_that_in_which_all_train(metrics: RunMetrics) -> None:
    window = many_adapters.while_all_train(metrics, 2, warm_up=2)
    assert [s.adapter for s in window] == list(ORDER[3:9]), "from b's second step to a's last"


def test_figures_of_a_run(metrics: RunMetrics) -> None:
    many = many_adapters.measure(metrics, 2)
    assert (many.steps, many.longest_wait) == (3, 1)
    assert many.steps_per_hour == pytest.approx(1800.0)
    assert many.wait_share == pytest.approx(0.25)
    assert many.publish_share == pytest.approx(0.1)
    assert many.final_accuracy == [0.5, 0.5]


@pytest.mark.parametrize(("order", "steps"), [("aaa", 0), ("abab", 1), ("abbba", 3)])
def test_longest_wait(order: str, steps: int) -> None:
    assert many_adapters.longest_wait(list(order)) == steps
