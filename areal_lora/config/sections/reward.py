"""The section ``adapters[].reward``: one reward, or a list of rewards that are added with their weights."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Discriminator, Field, PositiveFloat, Tag, model_validator

from areal_lora.config.sections.section import NAME, PositiveInt, Section

ONE, SEVERAL = "(one)", "(several)"
"""Tags of the two spellings in pydantic's locations; no key is called so."""

_CORRECT = (
    "Smallest reward of a correct answer, where the reward does not state `correct` itself; "
    "without either, an evaluation has a mean reward and no accuracy."
)


class RewardSection(Section):
    """Settings of every kind of reward: it is computed in killable child processes (`tasks.scorer_setup`)."""

    name: str | None = Field(
        None, pattern=NAME, description="Name of its value and parts in the metrics; in a list the kind if unset."
    )
    weight: float = Field(1.0, allow_inf_nan=False, description="Factor of this reward in the sum.")
    timeout_s: PositiveFloat = Field(5.0, description="Seconds for one answer; after that a `timeout`, never reward 0.")
    workers: PositiveInt = Field(1, description="Scorer processes.")


class BuiltInReward(RewardSection):
    kind: Literal["numeric_match", "math_verify"] = Field(
        "numeric_match", description="The last number is the answer's, or Math-Verify finds both equal."
    )


class FunctionReward(RewardSection):
    kind: Literal["function"] = "function"
    path: str = Field(
        description="`package.module:name` or `file.py:name` of `reward(completion, answer)`; it returns a number, "
        'a bool, or `{"reward": number, "correct": bool}`.'
    )
    network: bool = Field(False, description="Let the function open sockets, for example to query a judge.")
    allow_subprocess: bool = Field(
        False, description="Let the function start processes, inside bubblewrap where it is usable."
    )
    memory_mib: PositiveInt = Field(
        1024, description="Address space of a scorer process, MiB beyond its size after loading."
    )
    correct_threshold: float | None = Field(None, allow_inf_nan=False, description=_CORRECT)


class JudgeReward(RewardSection):
    kind: Literal["judge"] = "judge"
    url: str = Field(pattern=r"^https?://", description="Base URL of an OpenAI-compatible API, `https://host/v1`.")
    model: str = Field(description="Model that judges.")
    prompt: str = Field(
        description="Text of the question; `{completion}`, `{prompt}`, `{answer}` and columns by name are replaced."
    )
    system_prompt: str | None = Field(None, description="System message before the question.")
    key_env: str | None = Field(
        None, pattern=r"^[A-Za-z_]\w*$", description="Environment variable with the API key; no key is sent if unset."
    )
    json_field: str | None = Field(
        None, description="Read the score from this field of the reply's last JSON object, instead of by `pattern`."
    )
    pattern: str = Field(
        r"(?i)score\s*[:=]\s*(-?[0-9]+(?:\.[0-9]+)?)",
        description="Regular expression; its first group in the last match is the score: 0 to 10, which become reward "
        "0 to 1. Other scores are refused.",
    )
    parameters: dict[str, Any] = Field(
        default_factory=dict,
        description="Further fields of the request, such as `response_format` or `seed`, over `temperature: 0` and "
        "`max_tokens: 512`.",
    )
    timeout_s: PositiveFloat = Field(
        180.0, description="Seconds for one answer with all attempts; after that a `timeout`, never reward 0."
    )
    workers: PositiveInt = Field(4, description="Scorer processes; each scores the answers of one group at a time.")
    cache: bool = Field(True, description="Keep replies in the run folder; equal questions are sent once.")
    correct_threshold: float | None = Field(None, allow_inf_nan=False, description=_CORRECT)

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern is no regular expression, {error}: correct it") from None
        if groups < 1:
            raise ValueError("pattern has no group: put the number into parentheses")
        if self.key_env is not None and self.url.startswith("http://") and not _is_loopback(self.url):
            raise ValueError("url would send the key unencrypted: use https, or leave key_env out")
        return self


class CodeReward(RewardSection):
    kind: Literal["code"] = "code"
    inputs: str | None = Field(None, description="Column with the standard inputs of the tests: a text, or a list.")
    outputs: str | None = Field(None, description="Column with the expected standard outputs, one per input.")
    asserts: str | None = Field(
        None, description="Column with Python code, or a list of pieces, that runs after the answer's program."
    )
    credit: Literal["all", "partial"] = Field(
        "all", description="`all`: 1 if every test passes, else 0. `partial`: the share of tests that pass."
    )
    timeout_s: PositiveFloat = Field(60.0, description="Seconds for all tests of one answer; further tests fail.")
    test_s: PositiveFloat = Field(4.0, description="CPU seconds of one test; it ends after 2.5 times as many seconds.")
    test_memory_mib: PositiveInt = Field(256, description="Address space of the program in a test, MiB.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.outputs is None and self.asserts is None:
            raise ValueError("there are no tests: name a column in outputs, asserts or both")
        if self.inputs is not None and self.outputs is None:
            raise ValueError("inputs without outputs test nothing: name the column of the expected outputs")
        return self


RewardConfig = Annotated[BuiltInReward | FunctionReward | JudgeReward | CodeReward, Field(discriminator="kind")]


def _spelling(value: Any) -> str:
    return SEVERAL if isinstance(value, list) else ONE


RewardsConfig = Annotated[
    Annotated[RewardConfig, Tag(ONE)] | Annotated[list[RewardConfig], Field(min_length=1), Tag(SEVERAL)],
    Discriminator(_spelling),
]


def labels(rewards: list[RewardConfig]) -> list[str]:
    """Names of the rewards in the metrics: empty for a single one without a name."""
    if len(rewards) == 1:
        return [rewards[0].name or ""]
    return [reward.name or reward.kind for reward in rewards]


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def reward_keys(at: str, rewards: RewardsConfig) -> list[tuple[str, RewardConfig]]:
    """The rewards of the adapter at key ``at`` with the key of each, as the configuration spells it."""
    if isinstance(rewards, list):
        return [(f"{at}.reward.{i}", reward) for i, reward in enumerate(rewards)]
    return [(f"{at}.reward", rewards)]
