"""Rules about time-outs that watch over each other."""

from __future__ import annotations

from collections.abc import Iterator

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.rules.findings import Finding

LEAST_BEATS = 5
"""Heartbeats come once a second. One or two may be late on a busy machine or a slow disk."""


def time_outs(config: Config, facts: Facts) -> Iterator[Finding]:
    run, sync = config.run, config.weight_sync
    if run.heartbeat_timeout_s < LEAST_BEATS:
        yield Finding(
            path="run.heartbeat_timeout_s",
            reason=f"{run.heartbeat_timeout_s:g} s is too short: heartbeats come once a second, and some come late",
            fix=f"set it to {LEAST_BEATS} or more",
        )
    elif run.heartbeat_timeout_s > run.stall_s:
        yield Finding(
            path="run.heartbeat_timeout_s",
            reason=f"{run.heartbeat_timeout_s:g} s is longer than run.stall_s = {run.stall_s:g} s, "
            "by which a step that does not end is found",
            fix="lower it, or raise run.stall_s",
        )
    longest_s = sync.publish_s + sync.rejoin_s
    if run.stall_s <= longest_s:
        yield Finding(
            path="run.stall_s",
            reason=f"{run.stall_s:g} s is not longer than a publish may take that waits for servers, "
            f"{longest_s:g} s: trainer rank 0 sends no heartbeat meanwhile",
            fix="raise it, or lower weight_sync.timeout_s or weight_sync.rejoin_s",
        )
