"""Base class of all sections of the configuration, and the types that several of them use."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

NonNegInt = Annotated[int, Field(ge=0)]
NonNegFloat = Annotated[float, Field(ge=0)]
Arguments = dict[str, str | int | float | bool]
Scalar = str | int | float | bool | None


class Section(BaseModel):
    """Immutable; unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)
