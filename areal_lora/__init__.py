"""Asynchronous reinforcement learning with LoRA: the names that users of the library import.

>>> import areal_lora
>>> config = areal_lora.load_config(
...     ["examples/math/gsm8k_grpo_megatron_lora_moe.yaml", "examples/math/embedded.yaml"],
...     ["run.name=first", "run.steps=2"],
... )
>>> areal_lora.run(config)  # what `python -m areal_lora.launch` does; returns an exit code
0
>>> metrics = areal_lora.read_metrics(config.run_folder)
>>> [step.reward_mean for step in metrics.steps]
[0.25, 0.5]

Names are imported when they are first used, so ``import areal_lora`` loads nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_lora.config.load import load_config
    from areal_lora.config.models import Config
    from areal_lora.errors import ArealLoraError, ConfigError, ConfigErrors, ExitCode
    from areal_lora.launcher.run import run
    from areal_lora.obs.metrics.reader import iter_metrics, read_metrics
    from areal_lora.obs.metrics.records import RunMetrics
    from areal_lora.obs.report.page import write_report
    from areal_lora.obs.report.summary import Summary, read_summary
    from areal_lora.rollout.agents import AgentTask
    from areal_lora.rollout.multi_turn import Environment, Reply
    from areal_lora.rollout.workflow import Episode, Workflow, WorkflowContext
    from areal_lora.run_folder.paths import RunFolder
    from areal_lora.tasks.rewards import Graded
    from areal_lora.types import AdapterRef, Generation, Outcome, Sample, Trajectory, TrajectoryGroup

_MODULES = {
    # configure and run
    "load_config": "config.load",
    "Config": "config.models",
    "run": "launcher.run",
    "ExitCode": "errors",
    "ArealLoraError": "errors",
    "ConfigError": "errors",
    "ConfigErrors": "errors",
    # read a run folder
    "RunFolder": "run_folder.paths",
    "read_metrics": "obs.metrics.reader",
    "iter_metrics": "obs.metrics.reader",
    "RunMetrics": "obs.metrics.records",
    "read_summary": "obs.report.summary",
    "Summary": "obs.report.summary",
    "write_report": "obs.report.page",
    # write a reward, an environment, an agent or a workflow
    "Sample": "types",
    "Graded": "tasks.rewards",
    "Environment": "rollout.multi_turn",
    "Reply": "rollout.multi_turn",
    "AgentTask": "rollout.agents",
    "Workflow": "rollout.workflow",
    "WorkflowContext": "rollout.workflow",
    "Episode": "rollout.workflow",
    "AdapterRef": "types",
    "Generation": "types",
    "Outcome": "types",
    "Trajectory": "types",
    "TrajectoryGroup": "types",
}
__all__ = [
    "AdapterRef",
    "AgentTask",
    "ArealLoraError",
    "Config",
    "ConfigError",
    "ConfigErrors",
    "Environment",
    "Episode",
    "ExitCode",
    "Generation",
    "Graded",
    "Outcome",
    "Reply",
    "RunFolder",
    "RunMetrics",
    "Sample",
    "Summary",
    "Trajectory",
    "TrajectoryGroup",
    "Workflow",
    "WorkflowContext",
    "iter_metrics",
    "load_config",
    "read_metrics",
    "read_summary",
    "run",
    "write_report",
]


if not TYPE_CHECKING:  # a type checker shall refuse other names

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
