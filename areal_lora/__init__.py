"""Asynchronous reinforcement learning with LoRA: the names that users of the library import.

>>> import areal_lora
>>> run = areal_lora.train(
...     ["gsm8k_grpo_megatron_lora_moe.yaml", "embedded.yaml"],
...     overrides=["run.name=first", "run.steps=2"],
... )
>>> [step.reward_mean for step in run.steps]
[0.25, 0.5]
>>> areal_lora.load_run("runs/first").summary.steps
2

Names are imported when they are first used, so ``import areal_lora`` loads nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_lora.config.load import load_config
    from areal_lora.config.models import Config
    from areal_lora.errors import ArealLoraError, ConfigError, ConfigErrors, ExitCode, RunFailed, RunInterrupted
    from areal_lora.library.runs import Run, load_run, train
    from areal_lora.obs.metrics.records import EvalRecord, RunMetrics, StepRecord
    from areal_lora.obs.report.summary import Summary
    from areal_lora.rollout.agents import AgentTask
    from areal_lora.rollout.conversations import Environment, Reply
    from areal_lora.rollout.workflow import Episode, Workflow, WorkflowContext
    from areal_lora.tasks.rewards import Graded
    from areal_lora.types import AdapterRef, Generation, Outcome, Sample, TokenColumns, Trajectory, TrajectoryGroup

__version__ = "0.1.0"

_NAMES = {
    # configure and run
    "config.load": ("load_config",),
    "config.models": ("Config",),
    "errors": ("ArealLoraError", "ConfigError", "ConfigErrors", "ExitCode", "RunFailed", "RunInterrupted"),
    # start a run, or read a run folder
    "library.runs": ("Run", "load_run", "train"),
    "obs.metrics.records": ("EvalRecord", "RunMetrics", "StepRecord"),
    "obs.report.summary": ("Summary",),
    # write a reward, an environment, an agent or a workflow
    "tasks.rewards": ("Graded",),
    "rollout.conversations": ("Environment", "Reply"),
    "rollout.agents": ("AgentTask",),
    "rollout.workflow": ("Episode", "Workflow", "WorkflowContext"),
    "types": ("AdapterRef", "Generation", "Outcome", "Sample", "TokenColumns", "Trajectory", "TrajectoryGroup"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [
    "AdapterRef",
    "AgentTask",
    "ArealLoraError",
    "Config",
    "ConfigError",
    "ConfigErrors",
    "Environment",
    "Episode",
    "EvalRecord",
    "ExitCode",
    "Generation",
    "Graded",
    "Outcome",
    "Reply",
    "Run",
    "RunFailed",
    "RunInterrupted",
    "RunMetrics",
    "Sample",
    "StepRecord",
    "Summary",
    "TokenColumns",
    "Trajectory",
    "TrajectoryGroup",
    "Workflow",
    "WorkflowContext",
    "load_config",
    "load_run",
    "train",
]


if not TYPE_CHECKING:  # a type checker shall refuse other names

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
