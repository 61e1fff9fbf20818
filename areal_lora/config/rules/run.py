"""Rules about time-outs that watch over each other."""

from __future__ import annotations

from collections.abc import Iterator

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.rules.findings import Finding


def time_outs(config: Config, facts: Facts) -> Iterator[Finding]:
    run, sync = config.run, config.weight_sync
    longest_s = sync.publish_s + sync.rejoin_s
    if run.stall_s <= longest_s:
        yield Finding(
            path="run.stall_s",
            reason=f"{run.stall_s:g} s is not longer than a publish may take that waits for servers, "
            f"{longest_s:g} s: trainer rank 0 sends no heartbeat meanwhile",
            fix="raise it, or lower weight_sync.timeout_s or weight_sync.rejoin_s",
        )
