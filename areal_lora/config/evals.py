"""The entries of ``adapters[].evals``: the sets of held-out problems that a run is evaluated on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from areal_lora.config.section import NAME, NonNegFloat, PositiveInt, Section
from areal_lora.config.task import EvalTaskConfig

DEFAULT_SET = "held-out"
"""Name of the set of an adapter that configures none."""


class EvalSetConfig(Section):
    name: str = Field(pattern=NAME, description="Name of the set in records, plots and TensorBoard tags.")
    task: EvalTaskConfig | None = Field(
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
