"""From a configured reward to the `Setup` of its scorer processes, and the command that starts one."""

import logging
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from areal_lora.config.sections.task import CodeReward, FunctionReward, JudgeReward, ModelReward, RewardConfig
from areal_lora.network.api_client import ApiLimits
from areal_lora.run_folder.paths import RunFolder
from areal_lora.tasks.code_reward import TEST_S
from areal_lora.tasks.sandbox.fence import PARENT_PID, boxed
from areal_lora.tasks.sandbox.seccomp import ProcessPolicy
from areal_lora.tasks.scorer_child import Setup

CACHE_BYTES = 1 << 36
PROGRAM_BYTES = 1 << 24
MEMORY_BYTES, SCRATCH_BYTES = 1 << 32, 1 << 24
"""Address space of a scorer beyond its size after loading; largest file in a function's private temporary folder."""
MATH_CPU_S = 5.0  # of one answer, or Math-Verify has not found it equal
API_LIMITS = ApiLimits(attempt_s=60.0, attempts=5, backoff_s=1.0, concurrency=16)
"""Of all scorers: a hosted API answers within a minute and refuses more requests at a time than its rate allows,
whatever the run."""
OWN_SERVER_OPEN = 128  # requests at a time where there is no key: vLLM batches them

log = logging.getLogger(__name__)


def setup_of(reward: RewardConfig, hidden: Path | None) -> Setup:
    """What a scorer process of ``reward`` needs and may do."""
    own: dict[str, Any] = {}
    match reward:
        case _ if reward.kind == "math_verify":
            own = {"cpu_s": MATH_CPU_S}
        case FunctionReward():
            processes = ProcessPolicy.MANY if reward.allow_subprocess else ProcessPolicy.NONE
            own = {"path": reward.path, "network": reward.network, "processes": processes}
            own["scratch_bytes"] = SCRATCH_BYTES
        case JudgeReward() | ModelReward():
            together = OWN_SERVER_OPEN if reward.key_env is None else API_LIMITS.concurrency
            share = max(1, together // reward.workers)
            limits = msgspec.to_builtins(msgspec.structs.replace(API_LIMITS, concurrency=share))
            own = {"network": True, "slots": share, "settings": reward.model_dump() | {"limits": limits}}
            if hidden is not None and isinstance(reward, JudgeReward):
                kept = RunFolder(hidden).judge
                kept.mkdir(mode=0o700, exist_ok=True)
                own |= {"scratch_bytes": CACHE_BYTES, "kept": str(kept)}
        case CodeReward():
            own = {"settings": reward.model_dump() | {"test_s": TEST_S}, "processes": ProcessPolicy.MANY}
            own["scratch_bytes"] = PROGRAM_BYTES
    return Setup(
        kind=reward.kind,
        timeout_s=reward.timeout_s,
        memory_bytes=MEMORY_BYTES,
        hidden=None if hidden is None else str(hidden),
        parent_pid=os.getpid(),
        search_path=tuple(folder or os.getcwd() for folder in sys.path),
        **own,
    )


def in_a_box(argv: list[str], setup: Setup) -> tuple[list[str], Setup]:
    """Both for a process inside bubblewrap, where it is usable; the log has which way it is."""
    inside = boxed(argv, network=setup.network, hidden=setup.hidden, scratch=setup.scratch)
    _report_processes(setup.path or setup.kind, inside is not None)
    if inside is None:
        return argv, setup
    return inside, msgspec.structs.replace(setup, processes=ProcessPolicy.BOX, parent_pid=PARENT_PID)


@cache
def _report_processes(reward: str, in_box: bool) -> None:
    if in_box:
        log.info("the reward %s may start processes: inside bubblewrap", reward)
    else:
        log.warning(
            "the reward %s may start processes, without bubblewrap (not installed, not usable, or for root): "
            "seccomp, Landlock and limits hold; it sees the machine's processes, and memory is limited per process",
            reward,
        )
