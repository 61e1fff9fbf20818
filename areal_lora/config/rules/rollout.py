"""Rules about how rollouts run, and about time-outs that watch over each other."""

from __future__ import annotations

from collections.abc import Iterator

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.rules.findings import Finding


def deterministic(config: Config, facts: Facts) -> Iterator[Finding]:
    """Bit-identical answers need versions that do not change under them, and arithmetic without a choice of order."""
    rollout = config.rollout
    if not rollout.deterministic:
        return
    required = (
        ("rollout.max_staleness", rollout.max_staleness, 0),
        ("rollout.in_flight", rollout.in_flight, "finish"),
        ("rollout.adapter_mode", rollout.adapter_mode, "unmerged"),
        ("model.dtype", config.model.dtype, "float32"),
        ("cluster.device", config.cluster.device, "cpu"),
    )
    wrong = [(key, value, want) for key, value, want in required if value != want]
    if wrong:
        yield Finding(
            path="rollout.deterministic",
            reason=f"answers cannot be repeated with {', '.join(f'{key} = {value}' for key, value, _ in wrong)}",
            fix=f"set {', '.join(f'{key}={want}' for key, _, want in wrong)}, or rollout.deterministic=false",
        )


def merged_rollouts(config: Config, facts: Facts) -> Iterator[Finding]:
    """The servers' kernels can be given other weights."""
    if config.rollout.adapter_mode != "merged":
        return
    if config.rollout.expert_parallel and config.cluster.device == "cpu":
        yield Finding(
            path="rollout.expert_parallel",
            reason="without LoRA, vLLM's expert kernel for CPUs ends the process with distributed experts",
            fix="set it to false, or rollout.adapter_mode=unmerged",
        )


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
