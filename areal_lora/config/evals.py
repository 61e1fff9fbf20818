"""The entries of ``adapters[].evals``: the sets of held-out problems that a run is evaluated on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from areal_lora.config.section import NAME, NonNegFloat, PositiveInt, Section
from areal_lora.config.task import DatasetTask, TaskConfig

DEFAULT_SET = "held-out"
"""Name of the set of an adapter that configures none."""


class EvalSetConfig(Section):
    name: str = Field(pattern=NAME, description="Name of the set in records, plots and TensorBoard tags.")
    task: TaskConfig | None = Field(
        None, description="The set has the held-out split of this task; of the adapter's own task if unset."
    )
    workflow: Literal["trained", "single_turn"] = Field(
        "trained", description="`trained`: the adapter's workflow, an agent as an agent; `single_turn`: ask once."
    )
    n_samples: PositiveInt = Field(
        1, description="Answers per problem; with several there are pass@k and majority@k, and `temperature` is not 0."
    )
    temperature: NonNegFloat = Field(0.0, description="Divides the logits; 0: greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Sample from the likeliest tokens only.")
    max_new_tokens: PositiveInt | None = Field(
        None, description="Longest answer, in tokens; `sampling.max_new_tokens` if unset."
    )
    n: PositiveInt | None = Field(None, description="Use only so many problems, the first ones.")
    correct_threshold: float | None = Field(
        None,
        allow_inf_nan=False,
        description="Smallest reward of a correct answer where neither reward nor workflow says what is correct, "
        "for example that of an agent which returns its own reward.",
    )

    @model_validator(mode="before")
    @classmethod
    def _trains_on_nothing(cls, data: Any) -> Any:
        """Only held-out rows of a set's data set are read, so ``train`` may be left out."""
        task = data.get("task") if isinstance(data, Mapping) else None
        return (
            {**data, "task": {"train": "", **task}}
            if isinstance(task, Mapping) and task.get("kind") == "dataset"
            else data
        )

    @model_validator(mode="after")
    def _has_rows(self) -> Self:
        if isinstance(self.task, DatasetTask) and self.task.eval is None:
            raise ValueError("a set has held-out rows only: add task.eval")
        return self
