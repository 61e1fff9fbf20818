"""The configuration tree. Unknown keys are errors; this package imports no torch, vLLM or Megatron.

Its sections are defined by subject (``run``, ``adapter``, ``workflow``, ``roles``, ``cluster``, ``service``); users
import them from here.
"""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator

from areal_lora.config.sections.adapter import AdapterConfig, OptimizerConfig, SamplingConfig, SftConfig
from areal_lora.config.sections.run import (
    CheckpointConfig,
    ClusterConfig,
    EvalConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    ServiceConfig,
    TrainerConfig,
    WeightSyncConfig,
)
from areal_lora.config.sections.section import Section
from areal_lora.config.sections.task import (
    AgentWorkflowConfig,
    ClientWorkflowConfig,
    CustomWorkflowConfig,
    MultiTurnWorkflowConfig,
    SingleTurnWorkflowConfig,
    WorkflowConfig,
)
from areal_lora.run_folder.paths import RunFolder

__all__ = [
    "AdapterConfig",
    "AgentWorkflowConfig",
    "CheckpointConfig",
    "ClientWorkflowConfig",
    "ClusterConfig",
    "Config",
    "CustomWorkflowConfig",
    "EvalConfig",
    "ModelConfig",
    "MultiTurnWorkflowConfig",
    "OptimizerConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "ServiceConfig",
    "SftConfig",
    "SingleTurnWorkflowConfig",
    "TrainerConfig",
    "WeightSyncConfig",
    "WorkflowConfig",
]


class Config(Section):
    """The configuration of one run: YAML files merged in order, then dotted overrides."""

    run: RunConfig
    model: ModelConfig
    service: ServiceConfig | None = Field(
        None, description="If present, even as `{}`, adapters join and leave while the run works."
    )
    adapters: list[AdapterConfig] = Field(default_factory=list, validate_default=True)
    trainer: TrainerConfig
    rollout: RolloutConfig = RolloutConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()

    @field_validator("adapters")
    @classmethod
    def _trains_something(cls, adapters: list[AdapterConfig], info: ValidationInfo) -> list[AdapterConfig]:
        if not adapters and info.data.get("service") is None:
            raise ValueError("a run without a service has at least one adapter")
        return adapters

    @property
    def run_folder(self) -> RunFolder:
        return RunFolder(self.run.root / self.run.name)
