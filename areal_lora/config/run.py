"""The sections of a run as a whole: its name and limits, its base model, its checkpoints and evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat
from pydantic.json_schema import SkipJsonSchema

from areal_lora.config.section import NAME, NonNegInt, PositiveInt, Section


class RunConfig(Section):
    name: str = Field(pattern=NAME, description="Run name; also the folder below `root`.")
    root: Path = Field(Path("runs"), description="Folder that holds run folders.")
    seed: NonNegInt = Field(1, description="Seeds prompt order, adapter initialisation and sampling.")
    steps: PositiveInt = Field(
        description="Number of training steps; each trains on one batch and publishes one version."
    )
    max_restarts: NonNegInt = Field(
        3,
        description="Restarts after a failure: of the trainer, of the controller and of each server; requeues in a row "
        "of a Slurm job without a new checkpoint.",
    )
    stall_s: PositiveFloat = Field(
        900.0,
        description="Seconds without progress after which trainer rank 0, the controller's event loop or a server's "
        "engine counts as stuck: the stacks are written and it is restarted.",
    )


class ModelConfig(Section):
    path: str = Field(
        description="Hugging Face model folder, or hub name `org/name`; an existing folder takes precedence."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub name; its main branch if unset.")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Type of the frozen base weights.")
    shared_memory: bool = Field(
        False,
        description="The trainer ranks of a node read the base from disk once, into shared memory that is kept while "
        "they run.",
    )
    commit: SkipJsonSchema[str | None] = Field(
        None, description="Written by the launcher: the commit of a hub name that the run uses."
    )
    snapshot: SkipJsonSchema[str | None] = Field(
        None, description="Written by the launcher: the folder that holds this commit."
    )

    @property
    def folder(self) -> str:
        """The folder with the model files. ``path`` is the model's name for the user and in the exported adapter."""
        return self.snapshot or self.path


class CheckpointConfig(Section):
    every_steps: PositiveInt = Field(1, description="Steps between two checkpoints; the last step is always saved.")
    keep_last: Annotated[int, Field(ge=2)] = Field(2, description="Newest checkpoints kept; at least 2.")
    keep_every: NonNegInt = Field(
        0, description="Also keep checkpoints of versions that are a multiple of this; 0: none."
    )
    keep_best: bool = Field(
        True, description="Also keep the checkpoint with the best evaluation: by accuracy, then by mean reward."
    )


class EvalConfig(Section):
    every_steps: NonNegInt = Field(
        20, description="Steps between two evaluations of all sets, one at a time; 0: only first and last."
    )
