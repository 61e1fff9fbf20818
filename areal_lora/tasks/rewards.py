r"""Rewards: the built-in ones by name, and exact numeric match between a completion and a gold answer.

The parser never evaluates text and runs in linear time: a run of characters that starts with a
digit is consumed once, as a number or as another token. Values are exact fractions, so
``0.5``, ``1/2`` and ``\frac{1}{2}`` are equal.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.tasks.loading import load_import_path
from areal_lora.tasks.reward_calls import RewardCall
from areal_lora.tasks.rows import value_of
from areal_lora.types import Sample, gold_text


class Graded(TypedDict, total=False):
    """Return type of a reward function in place of a number: the reward, and whether the answer is correct.

    Further entries are named components of the reward; without ``reward`` their sum is the reward.
    """

    reward: float
    correct: bool | None


MAX_DIGITS = 64  # longer runs are no answers, and int() of a long string takes quadratic time

_CHARACTERS = str.maketrans(dict.fromkeys("−–‒﹣－", "-") | dict.fromkeys("\u00a0\u2009\u202f", " "))
_LATEX = (
    (r"\$", "$"),
    (r"\%", "%"),
    (r"\,", ""),
    (r"\!", ""),
    ("{,}", ","),
    (r"\dfrac", r"\frac"),
    (r"\tfrac", r"\frac"),
)

_INT = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_TOKEN = re.compile(
    rf"""
    (?P<number>
      (?P<sign>(?<![0-9A-Za-z_)\]}}])(?<![0-9)]\ )[-+]\ ?)?     # not the minus of a subtraction
      (?:[$€£¢¥]\ ?(?P<inner_sign>[-+])?)?
      (?<![0-9A-Za-z_])
      (?: \\frac\ ?\{{\ ?(?P<top>-?{_INT})\ ?\}}\ ?\{{\ ?(?P<bottom>-?{_INT})\ ?\}}
        | (?:(?P<whole>{_INT})\ )?(?P<numerator>{_INT})\ ?/\ ?(?P<denominator>{_INT})
        | (?P<decimal>(?:{_INT}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,2}})?)
      )
      (?![0-9]|[.,:/][0-9]|[eE][-+]?[0-9])
    )
    | [0-9][0-9A-Za-z_.,:/+-]*                                  # consumed whole: not a number
    """,
    re.VERBOSE,
)
_ANSWER_IS = re.compile(r"answer\s*(?:is|:|=)", re.IGNORECASE)


def parse_number(text: str) -> Fraction | None:
    r"""Parse the first number of ``text``, after any currency signs, units and words.

    Accepts thousands commas, signs (also a unicode minus), decimals, exponents up to two
    digits, ``a/b``, ``\frac{a}{b}`` and mixed numbers ``3 1/2``. A percent sign is a unit:
    ``50%`` is 50. Returns None if the first token with a digit is malformed (``1,23``, ``10:30``),
    divides by zero, or is longer than ``MAX_DIGITS``.
    """
    token = _TOKEN.search(_normalize(text))
    return None if token is None else _value(token)


def extract_answer(text: str) -> Fraction | None:
    r"""Return the stated answer of a worked solution, or None.

    The order of precedence is: the first ``#### x``, the last ``\boxed{x}``, the last
    ``answer is x`` (also ``answer: x``), the last number in the text. A marker without a number
    after it gives None.
    """
    text = _normalize(text)
    _, marker, tail = text.partition("####")
    if marker:
        return parse_number(_first_line(tail))
    _, marker, tail = text.rpartition(r"\boxed")
    if marker:
        content = braced(tail)
        return None if content is None else parse_number(content)
    stated = _last(_ANSWER_IS.finditer(text))
    if stated is not None:
        return parse_number(_first_line(text[stated.end() :]))
    token = _last(_TOKEN.finditer(text))
    return None if token is None else _value(token)


def numeric_match(completion: str, gold: str) -> bool:
    """Return whether both state the same number. Raises ValueError if ``gold`` states none."""
    expected = extract_answer(gold)
    if expected is None:
        raise ValueError(f"gold answer states no number: {gold[-80:]!r}")
    return extract_answer(completion) == expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """A finite reward. ``correct`` is None where the task has no rule for it. ``components`` are its named parts."""

    reward: float
    correct: bool | None
    components: Mapping[str, float] = field(default_factory=dict)


def grade(value: object, correct_threshold: float | None) -> Grade:
    """Check the return value of a reward function. Raises TypeError, ValueError, OverflowError.

    A bool states whether the answer is correct, and its reward is 1 or 0. A mapping may have ``correct``; its other
    entries are named components, and the reward is its ``reward``, or else the sum of the components. Any other reward
    is correct if it is at least ``correct_threshold``.
    """
    correct: object = None
    components: dict[str, float] = {}
    if isinstance(value, Mapping):
        for name, part in value.items():
            if name not in ("reward", "correct"):
                if isinstance(part, bool):
                    raise TypeError(f"component {name!r} is a bool, not a number; only 'correct' may be one")
                components[str(name)] = _number(f"component {name!r} is", part)
        if "reward" not in value and not components:
            raise TypeError("a dict must have 'reward' or named components, this one has neither")
        correct = value.get("correct")
        value = value["reward"] if "reward" in value else sum(components.values())
        if correct is not None and correct not in (True, False):
            raise ValueError(f"'correct' is {correct!r}, neither true nor false")
    reward = _number("the reward returned", value)
    if correct is None and isinstance(value, bool):
        correct = value
    if correct is None and correct_threshold is not None:
        correct = reward >= correct_threshold
    return Grade(reward=reward, correct=None if correct is None else bool(correct), components=components)


def _number(what: str, value: Any) -> float:
    """``value`` as a float; a text that reads as a number is none."""
    number = None
    if not isinstance(value, str | bytes | bytearray):
        with suppress(TypeError):
            number = float(value)
    if number is None:
        raise TypeError(f"{what} {'None' if value is None else f'a {type(value).__name__}'}, not a number")
    if not math.isfinite(number):
        raise ValueError(f"{what} {number}, not a finite number")
    return number


def reward_call(
    kind: str,
    *,
    path: str | None = None,
    settings: Mapping[str, Any] | None = None,
    kept: str | None = None,
    scratch: str | None = None,
) -> RewardCall:
    """Load a reward: the function at ``path`` is imported, ``settings`` are a judge's or code reward's configuration.

    ``kept`` is the folder of a judge's cache, ``scratch`` a folder that may be written. Raises EnvironmentError_ if a
    package is missing, ConfigError if the function cannot be loaded or a key is not set.
    """
    match kind:
        case "numeric_match":
            return RewardCall.of(_by_text(numeric_match), kind)
        case "math_verify":
            try:
                from areal_lora.tasks.math_reward import math_verify
            except ImportError as error:
                raise EnvironmentError_(
                    f"reward math_verify: {error} (fix: pip install math-verify, or use kind: numeric_match)"
                ) from error
            return RewardCall.of(_by_text(math_verify), kind)
        case "judge":
            from areal_lora.tasks.judge import JudgeSettings, LlmJudge

            judge = LlmJudge(msgspec.convert(settings, JudgeSettings), None if kept is None else Path(kept))
            return RewardCall.of(judge, kind, judge.take_costs)
        case "code":
            from areal_lora.tasks.code_reward import CodeRunner, CodeSettings

            assert scratch is not None
            return RewardCall.of(CodeRunner(msgspec.convert(settings, CodeSettings), Path(scratch)), "code")
    if path is None:
        raise ConfigError("reward.kind", f"there is no reward {kind!r}")
    return RewardCall.of(load_import_path(path), path)


def _by_text(match: Callable[[str, str], bool]) -> Callable[[str, Any], bool]:
    """A built-in rule for gold answers of any type."""

    def reward(completion: str, answer: Any) -> bool:
        return match(completion, gold_text(answer))

    return reward


def _last(matches: Iterator[re.Match[str]]) -> re.Match[str] | None:
    return next(iter(deque(matches, maxlen=1)), None)


def _normalize(text: str) -> str:
    text = text.translate(_CHARACTERS)
    for latex, plain in _LATEX:
        text = text.replace(latex, plain)
    return text


def _first_line(text: str) -> str:
    return text.lstrip(" ").partition("\n")[0]


def braced(text: str) -> str | None:
    """Return the content of the brace group at the start of ``text``; None if it has no end."""
    text = text.lstrip()
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:position] if position else None
    return None


def _value(token: re.Match[str]) -> Fraction | None:
    if token["number"] is None or sum(map(str.isdecimal, token["number"])) > MAX_DIGITS:
        return None
    negative = ((token["sign"] or "")[:1] == "-") != (token["inner_sign"] == "-")
    if token["decimal"] is not None:
        value = Fraction(token["decimal"].replace(",", ""))
    else:
        top, bottom = _int(token["top"] or token["numerator"]), _int(token["bottom"] or token["denominator"])
        if bottom == 0:
            return None
        value = _int(token["whole"] or "0") + Fraction(top, bottom)
    return -value if negative else value


def _int(text: str) -> int:
    return int(text.replace(",", ""))


def given_answer(sample: Sample, column: str | None) -> str:
    """The text in ``column``, the gold answer if it is None. Raises ConfigError for a row that has none."""
    try:
        value = sample.gold if column is None else value_of(sample.columns, column)
    except KeyError:
        value = None
    if isinstance(value, str) and value.strip():
        return value
    known = ", ".join(sample.columns) or "none"
    what = "gold answer" if column is None else f"text in column {column!r}"
    raise ConfigError("sft.column", f"{sample.uid} has no {what}", f"name a column of text; its columns: {known}")
