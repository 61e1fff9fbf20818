"""Rates of two adapters, one of them resumed, against figures made by hand."""

from __future__ import annotations

from areal_lora.trainer.recording import RateMeter
from areal_lora.trainer.step_metrics import Metrics


def rates(tokens_per_s: float, servers_idle: float) -> Metrics:
    return {"train/rollout_tokens_per_s": tokens_per_s, "train/servers_idle": servers_idle}


def test_rates_are_those_since_the_adapters_step_before() -> None:
    meter = RateMeter(["new"], now_s=100.0)
    assert meter.step("new", tokens=50, idle_s=4.0, now_s=110.0) == rates(tokens_per_s=5.0, servers_idle=0.4)
    assert meter.step("resumed", tokens=10_000, idle_s=900.0, now_s=111.0) == {}
    assert meter.step("new", tokens=50, idle_s=4.0, now_s=112.0) == rates(tokens_per_s=0.0, servers_idle=0.0)
    assert meter.step("resumed", tokens=10_020, idle_s=905.0, now_s=121.0) == rates(tokens_per_s=2.0, servers_idle=0.5)


def test_counters_that_begin_anew_tell_no_rate() -> None:
    meter = RateMeter(["a"], now_s=0.0)
    meter.step("a", tokens=100, idle_s=5.0, now_s=10.0)
    assert meter.step("a", tokens=20, idle_s=6.0, now_s=20.0) == {}
    assert meter.step("a", tokens=40, idle_s=26.0, now_s=30.0) == rates(tokens_per_s=2.0, servers_idle=1.0)
