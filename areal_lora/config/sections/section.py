"""Base class of all sections of the configuration, and the types that several of them use."""

import os
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from areal_lora.network.addresses import on_loopback


def _of_64_bits(value: int) -> int:
    """Messages and SQLite hold no other integers."""
    if value >= 1 << 63:
        raise ValueError("it must be below 2**63")
    return value


NonNegInt = Annotated[int, Field(ge=0), AfterValidator(_of_64_bits)]
PositiveInt = Annotated[int, Field(gt=0), AfterValidator(_of_64_bits)]
Count = Annotated[int, Field(gt=0, le=1 << 16)]
"""Of what rules go through one by one: processes, nodes, adapters, and the numbers of a row of a matrix."""
LocalPath = Annotated[Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))]
"""``~`` and ``~user`` are home folders, as in a shell."""
Port = Annotated[int, Field(ge=0, le=65535)]
NonNegFloat = Annotated[float, Field(ge=0)]
TIME_LIMIT = r"^(\d+|\d+:\d+(:\d+)?|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE)$"
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""A name that is also part of file names, URLs and tags."""
Scalar = str | int | float | bool | None


class Section(BaseModel):
    """Immutable; unknown keys are rejected. A description of a key that is longer than its line stands below it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ServedModel(Section):
    """A model that others serve. Its key is in no file: the configuration names a variable."""

    url: str = Field(pattern=r"^https?://", description="Base URL of an OpenAI-compatible API, `https://host/v1`.")
    model: str = Field(description="The model's name there.")
    key_env: str | None = Field(None, pattern=r"^[A-Za-z_]\w*$")
    """Environment variable with the API key; no key is sent if unset."""

    @model_validator(mode="after")
    def _key_is_encrypted(self) -> Self:
        if self.key_env and self.url.startswith("http://") and not on_loopback(urlsplit(self.url).hostname or ""):
            raise ValueError("url would send the key unencrypted: use https, or leave key_env out")
        return self


def described(pattern: str) -> str:
    """The words for a pattern, for the line that refuses a value."""
    return _PATTERNS.get(pattern, f"a text that matches {pattern}")


_PATTERNS = {
    NAME: "letters, digits, dots, underscores and hyphens, with a letter or digit first",
    TIME_LIMIT: "minutes, or HH:MM:SS or D-HH:MM:SS in quotes, or UNLIMITED",
    r"^\d+[KMGTkmgt]?$": "a size such as 800G",
    r"[\s\S]": "a text that is not empty",
    r":": "package.module:name or file.py:name",
    r"^\S+$": "a text without spaces",
    r"^\S*$": "a text without spaces",
    r"^[^\r\n]+$": "one line of text",
    r"^[a-z][a-z0-9+.-]*://": "a URL such as s3://bucket/folder",
    r"^[A-Za-z_]\w*$": "the name of an environment variable",
    r"^https?://": "a URL that starts with https:// or http://",
    r"^https?://.*/(classify|score|pooling)$": "a URL that ends with /classify, /score or /pooling",
}
