r"""Rewards by name, and the built-in ones: exact numeric match, and equality of mathematical expressions.

The parser of numbers never evaluates text and runs in linear time: a run of characters that starts with a
digit is consumed once, as a number or as another token. Values are exact fractions, so
``0.5``, ``1/2`` and ``\frac{1}{2}`` are equal.
"""

import importlib
import logging
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.processes.loading import load_import_path
from areal_lora.tasks.reward_calls import RewardCall, Score
from areal_lora.types import Outcome, gold_text


class Graded(TypedDict, total=False):
    """Return type of a reward function in place of a number: the reward, and whether the answer is correct.

    Further entries are named components of the reward; without ``reward`` their sum is the reward. verl's ``score`` is
    a reward, too.
    """

    reward: float
    correct: bool | None


MAX_DIGITS = 64  # longer runs are no answers, and int() of a long string takes quadratic time

_CHARACTERS = str.maketrans(dict.fromkeys("−–‒﹣－", "-") | dict.fromkeys("\u00a0\u2009\u202f", " "))
_LATEX = {r"\$": "$", r"\%": "%", r"\,": "", r"\!": "", "{,}": ",", r"\dfrac": r"\frac", r"\tfrac": r"\frac"}
_LATEX |= {r"^\circ": "°", r"^{\circ}": "°"}  # units, no powers

_INT = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_ARGUMENT = rf"(?:\{{\ ?-?{_INT}\ ?\}}|[0-9])"  # of \frac
_TOKEN = re.compile(
    rf"""
    (?P<number>
      (?P<sign>(?<![0-9A-Za-z_)\]}}])(?<![0-9)]\ )[-+]\ ?)?     # not the minus of a subtraction
      (?:[$€£¢¥]\ ?(?P<inner_sign>[-+])?)?
      (?<![0-9A-Za-z_])
      (?: (?:(?P<mixed>{_INT})\ ?)?\\frac\ ?(?P<top>{_ARGUMENT})\ ?(?P<bottom>{_ARGUMENT})
        | (?:(?P<whole>{_INT})\ )?(?P<numerator>{_INT})\ ?/\ ?(?P<denominator>{_INT})
        | (?P<decimal>(?:{_INT}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,2}})?)
      )
      (?![0-9]|[.,:/][0-9]|[eE][-+]?[0-9])
      (?!\ ?\\(?:times|cdot))                                   # a factor
      (?!\ ?\^\ ?\{{?\ ?(?:[-+]?[0-9]|[A-Za-np-z]\b))           # a base; ^o is a degree, ^{{th}} an ordinal
    )
    | [0-9][0-9A-Za-z_.,:/+-]*                                  # consumed whole: not a number
    """,
    re.VERBOSE,
)
_ANSWER_IS = re.compile(r"answer\s*(?:is|:|=)", re.IGNORECASE)
_PROSE = re.compile(r"(?<!\\)\b[A-Za-z]{2,}")
_UNIT = re.compile(r"\\(?:text|textbf|mbox|mathrm)\s*\{[^{}]*\}")
_HEADING = re.compile(
    r"[\W_]*+(?:(?<!\\)[^\W\d_]{2,}|[0-9]+[.)] \W*[^\W\d_]|$)"
)  # prose, a numbered heading, or nothing
_FORMULA = re.compile(r"[\d(=^\\]")
_DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")


def parse_number(text: str) -> Fraction | None:
    r"""Parse the first number of ``text``, after any currency signs, units and words.

    Accepts thousands commas, signs (also a unicode minus), decimals, exponents up to two digits, ``a/b``,
    ``\frac{a}{b}``, ``\frac12`` and mixed numbers ``3 1/2``. Percent and degrees are units: ``50%`` is 50. Returns None
    if the first token with a digit is malformed (``1,23``, ``10:30``), the base of a power, a factor before ``\times``
    or ``\cdot``, divides by zero, or is longer than ``MAX_DIGITS``.
    """
    token = _TOKEN.search(_normalize(text))
    return None if token is None else _value(token)


def extract_answer(text: str) -> Fraction | None:
    r"""Return the stated answer of a worked solution, or None.

    The order of precedence is: ``#### x`` (`marked_answer`), the last ``\boxed{x}``, the last ``answer is x`` (also
    ``answer: x``), the last number in the text. A marker without a number after it gives None, as do thoughts alone.
    """
    text = _normalize(_without_thoughts(text))
    if (final := marked_answer(text)) is not None:
        return parse_number(final)
    _, marker, tail = text.rpartition(r"\boxed")
    if marker:
        content = braced(tail)
        return None if content is None else parse_number(content)
    stated = _last(_ANSWER_IS.finditer(text))
    if stated is not None:
        return parse_number(text[stated.end() :].lstrip(" ").partition("\n")[0])
    token = _last(_TOKEN.finditer(text))
    return None if token is None else _value(token)


def states_several(gold: str) -> bool:
    r"""Whether ``\boxed{}`` makes another number of a gold: ``2\sqrt{3}``, ``3, 5``. Prose and ``a = 5`` are none."""
    result = gold.rpartition("=")[2]
    return not _PROSE.search(_UNIT.sub("", gold)) and extract_answer(rf"\boxed{{{result}}}") != extract_answer(gold)


def numeric_match(completion: str, gold: Any) -> bool:
    """Return whether both state the same number. Raises ValueError if ``gold``, of any JSON type, states none."""
    expected = extract_answer(text := gold_text(gold))
    if expected is None:
        raise ValueError(f"gold answer states no number: {text[-80:]!r}")
    return extract_answer(completion) == expected


def math_verify(completion: str, gold: Any) -> bool:
    r"""Return whether both state equal expressions, by the package math-verify (sympy).

    A text with ``#### x`` states x, as in GSM8K; in any other text math-verify searches for LaTeX (``\boxed{}``,
    ``$...$``) and numbers. Both sides may use either form. A list has alternatives. The scorer process limits the time,
    not math-verify. Raises ValueError if ``gold``, of any JSON type, states no readable expression.
    """
    from math_verify import verify

    golds = [_expressions(gold_text(one), whole=True) for one in (gold if isinstance(gold, list) else [gold])]
    if not any(golds):
        raise ValueError(f"gold answer states no expression: {gold_text(gold)[-80:]!r}")
    how = {"timeout_seconds": None, "raise_on_error": True}
    stated = _expressions(completion, whole=False)
    return any(stated and expected and _understood(verify, expected, stated, **how) for expected in golds)


def _expressions(text: str, *, whole: bool) -> list[Any]:
    """Return the expressions in ``text``, parsed by math-verify. ``whole``: all of it may be one bare expression."""
    from math_verify import parse

    text = _without_thoughts(text)
    if (final := marked_answer(text)) is not None:
        text, whole = final, True
    text = text.strip()
    forms = [text]
    if whole and not _DELIMITED.search(text):
        forms.insert(1 if _PROSE.search(text) else 0, f"${text}$")
    how = {"parsing_timeout": None, "raise_on_error": True, "fallback_mode": "no_fallback"}
    return next((list(found) for form in forms if (found := _understood(parse, form, **how))), [])


def _understood(function: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
    """What a function of math-verify returns; None for what it does not understand."""
    try:
        return function(*arguments, **how)
    except MemoryError:
        raise
    except Exception:  # fault boundary: the library raises many types about text that is no mathematics  # noqa: BLE001
        return None


def grade(value: object) -> Score:
    """The score that a reward function returned as ``value``. Raises TypeError, ValueError, OverflowError.

    A bool states whether the answer is correct, and its reward is 1 or 0. A mapping may have ``correct``; its other
    entries are named components, and the reward is its ``reward``, or else the sum of the components. With ``score`` in
    place of ``reward`` it is one of verl's.
    """
    correct: object = None
    components: dict[str, float] = {}
    if isinstance(value, Mapping) and "score" in value and "reward" not in value:
        value = _of_verl(value)
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
    graded = None if correct is None else bool(correct)
    return Score(reward=reward, outcome=Outcome.OK, correct=graded, components=components)


def _of_verl(value: Mapping[Any, Any]) -> dict[Any, Any]:
    """``value`` in the terms of `grade`: verl's reward managers train on ``score`` and log all other entries alone."""
    given = dict(value)
    reward, acc = given.pop("score"), given.get("acc")
    if acc in (True, False):
        given.setdefault("correct", given.pop("acc"))
    numbers = {name: part for name, part in given.items() if not isinstance(part, str | None)}
    return {name: int(part) if isinstance(part, bool) else part for name, part in numbers.items()} | {"reward": reward}


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
    """Load a reward: the function at ``path`` is imported.

    ``settings`` are the keys of a judge, reward model or code reward. ``kept`` is the folder of a judge's cache,
    ``scratch`` a folder that may be written. Raises EnvironmentError_ if a package is missing, ConfigError if the
    function cannot be loaded or a key is not set.
    """
    match kind:
        case "numeric_match":
            return RewardCall.of(numeric_match, kind)
        case "math_verify":
            try:
                importlib.import_module("math_verify")  # now, not within the time of the first answer
            except ImportError as error:
                raise EnvironmentError_(
                    f"reward math_verify: {error} (fix: pip install math-verify, or use kind: numeric_match)"
                ) from error
            logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns at every start that it has no time limit
            return RewardCall.of(math_verify, kind)
        case "judge":
            from areal_lora.tasks.judge import JudgeSettings, LlmJudge

            judge = LlmJudge(msgspec.convert(settings, JudgeSettings), None if kept is None else Path(kept))
            return RewardCall.of(judge, kind, judge.client.take_costs)
        case "model":
            from areal_lora.tasks.judge import ModelSettings, RewardModel

            model = RewardModel(msgspec.convert(settings, ModelSettings))
            return RewardCall.of(model, kind, model.client.take_costs)
        case "none":
            return RewardCall.of(lambda completion: 0.0, kind)
        case "code":
            from areal_lora.tasks.code_reward import CodeRunner, CodeSettings

            assert scratch is not None
            return RewardCall.of(CodeRunner(msgspec.convert(settings, CodeSettings), Path(scratch)), "code")
    if path is None:
        raise ConfigError("reward.kind", f"there is no reward {kind!r}")
    return RewardCall.of(load_import_path(path), path)


def _last(matches: Iterator[re.Match[str]]) -> re.Match[str] | None:
    return next(iter(deque(matches, maxlen=1)), None)


def _normalize(text: str) -> str:
    text = text.translate(_CHARACTERS)
    for latex, plain in _LATEX.items():
        text = text.replace(latex, plain)
    return text


def _without_thoughts(text: str) -> str:
    """What follows the last ``</think>``, up to a thought without end."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def marked_answer(text: str) -> str | None:
    """The rest of the line after the first ``####`` that states an answer, as in GSM8K; None without one.

    Headings and prose are passed over. If all lines are such, the last is the answer unless one is stated in another
    way after it; it ends the text, or is alone with a number or formula.
    """
    marked = [tail.lstrip(" ").partition("\n")[::2] for tail in text.split("####")[1:]]
    if (found := next((line for line, _ in marked if not _HEADING.match(line)), None)) is not None:
        return found
    named = [(line, rest) for line, rest in marked if re.search(r"\w", line)]
    follows = "".join(rest for _, rest in named) if named else text
    if not marked or r"\boxed" in follows or _ANSWER_IS.search(follows):
        return None
    line, rest = (named or marked)[-1]
    return line if not rest.strip() or (len(named) == 1 and _FORMULA.search(line)) else None


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
        value = _int(token["whole"] or token["mixed"] or "0") + Fraction(top, bottom)
    return -value if negative else value


def _int(text: str) -> int:
    return int(text.strip("{ }").replace(",", ""))
