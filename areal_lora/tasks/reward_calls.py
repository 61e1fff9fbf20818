"""Call a reward function with the arguments that it names.

A function takes any of ``completion``, ``answer``, ``prompt``, ``messages``, ``columns``, ``n_tokens`` and
``finish_reason``, columns of the data set by name, and `_OTHER_NAMES`, which verl's rewards have; ``**kwargs`` gets all
of these. A function that names no completion gets the completion and the answer in its first two parameters. If the
first is the problem, the gold answer or a column, nothing states what the second is; after `_OF_COMPLETION` it is the
answer.

A coroutine function scores the answers of a batch concurrently. A function with a parameter ``completions`` scores a
batch at once: every argument is a list with one entry per answer, as TRL calls its rewards, and it returns a list.
Completions annotated ``list[list[dict]]`` are messages, as in TRL's chats.
"""

import asyncio
import errno
import inspect
import logging
import math
import socket
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from areal_lora.errors import ConfigError
from areal_lora.types import Cause, Outcome, Sample

log = logging.getLogger(__name__)

_BATCHED = {"completions": "completion", "answers": "answer", "prompts": "prompt", "finish_reasons": "finish_reason"}
_BATCHED |= {name: name for name in ("answer", "messages", "columns", "n_tokens")}
_OTHER_NAMES = {"gold": "answer", "ground_truth": "answer", "solution_str": "completion"}
_OF_COMPLETION = ("messages", "n_tokens", "finish_reason")  # such a parameter may stand for the completion
_FIX = "name a function reward(completion, answer) that returns a number"
_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ScoreItem(msgspec.Struct, frozen=True, kw_only=True):
    """One answer with all that a reward may use.

    ``completion`` is what the model wrote, ``answer`` the gold answer. ``messages`` is the whole conversation with the
    answer as its last message; a plain prompt is a user message. ``columns`` has all columns of the data set's row.
    ``n_tokens`` counts the tokens of the (last) answer, 0 if unknown; its ``finish_reason`` is ``stop`` or ``length``.
    """

    completion: str
    answer: Any = None
    prompt: str = ""
    messages: list[dict[str, Any]] = []
    columns: dict[str, Any] = {}
    n_tokens: int = 0
    finish_reason: str = ""

    @classmethod
    def of(
        cls,
        sample: Sample,
        completion: str,
        *,
        n_tokens: int = 0,
        finish_reason: str = "",
        prefill: str = "",
        turns: Sequence[dict[str, Any]] = (),
    ) -> "ScoreItem":
        """``completion`` as the answer to ``sample``; ``prefill`` is the text that it starts with.

        ``turns`` are the messages after the prompt where the answer, the last one, is not alone.
        """
        prompt = sample.messages or ({"role": "user", "content": sample.prompt},)
        return cls(
            completion=completion,
            answer=sample.answer,
            prompt=sample.prompt,
            messages=[*prompt, *(turns or [{"role": "assistant", "content": prefill + completion}])],
            columns=dict(sample.columns),
            n_tokens=n_tokens,
            finish_reason=finish_reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Score of one answer. ``reward`` is NaN unless ``outcome`` is ``ok``; ``detail`` and ``cause`` state the reason.

    ``correct`` is None if the answer was not scored or the reward has no rule for correctness. ``components`` are the
    named parts of the reward, if it has any. ``applies`` is false where a function returned None: of several rewards it
    is not the one for this answer.
    """

    reward: float
    outcome: Outcome
    detail: str = ""
    correct: bool | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    cause: Cause = Cause.OTHER
    applies: bool = True

    @classmethod
    def fault(cls, outcome: Outcome, detail: str, cause: Cause = Cause.OTHER, *, applies: bool = True) -> "Score":
        """An answer that could not be scored."""
        return cls(reward=math.nan, outcome=outcome, detail=detail, cause=cause, applies=applies)


class Style(StrEnum):
    """How a function is called: for each answer, as a coroutine for each answer, or once for a batch."""

    EACH = "each"
    ASYNC = "async"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCall:
    """A reward function and its calling convention. ``parameters`` is None if it has no signature to read.

    ``take_costs`` returns what was spent since its last call, by name.
    """

    function: Callable[..., Any]
    style: Style
    parameters: tuple[inspect.Parameter, ...] | None
    take_costs: Callable[[], dict[str, float]] = dict

    @classmethod
    def of(cls, function: Any, name: str, take_costs: Callable[[], dict[str, float]] = dict) -> "RewardCall":
        """Raises ConfigError for what cannot be called as a reward."""
        if not callable(function):
            raise ConfigError(name, f"is of type {type(function).__name__}, not a function", _FIX)
        try:
            parameters: tuple[inspect.Parameter, ...] | None = tuple(inspect.signature(function).parameters.values())
        except ValueError:
            parameters = None  # compiled functions may have no signature
        needed = [p for p in parameters or () if p.default is inspect.Parameter.empty]
        if any(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in needed[2:]):
            raise ConfigError(name, "has more than two parameters without a name", _FIX)
        if parameters == ():
            raise ConfigError(name, "takes no arguments", _FIX)
        batch = any(p.name == "completions" for p in parameters or ())
        coroutine = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        style = Style.BATCH if batch else Style.ASYNC if coroutine else Style.EACH
        return cls(function=function, style=style, parameters=parameters, take_costs=take_costs)

    def one(self, item: ScoreItem) -> Any:
        """Score one answer; a coroutine in the style ``async``. Raises what the function raises."""
        if self.parameters is None:
            return self.function(item.completion, item.answer)
        return self._call(_fields(item), item.columns)

    def many(self, items: Sequence[ScoreItem]) -> list[Any]:
        """Score a batch. Raises what the function raises, ValueError for another number of rewards than answers."""
        each = [_fields(item) for item in items]
        fields = {name: [values[single] for values in each] for name, single in _BATCHED.items()}
        if any(p.name == "completions" and _is_chat(p.annotation) for p in self.parameters or ()):
            fields["completions"] = [[{"role": "assistant", "content": item.completion}] for item in items]
        names = {name: None for item in items for name in item.columns}
        columns = {name: [item.columns.get(name) for item in items] for name in names}
        result = self._call(fields, columns)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        rewards = list(result)
        if len(rewards) != len(items):
            raise ValueError(f"{len(rewards)} rewards for {len(items)} answers")
        return rewards

    def _call(self, fields: Mapping[str, Any], columns: Mapping[str, Any]) -> Any:
        assert self.parameters is not None
        known = {**{name: fields[own] for name, own in _OTHER_NAMES.items() if own in fields}, **columns, **fields}
        first, *_ = self.parameters
        completions = {"completion", "completions"} | ({"solution_str"} - columns.keys())
        explicit = any(p.name in completions for p in self.parameters)
        by_name = explicit or (first.kind in _KEYWORD and first.name in known and first.name not in _OF_COMPLETION)
        first_two = [] if by_name else [fields["completion"], fields["answer"]]
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for index, parameter in enumerate(self.parameters):
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                taken = {p.name for p in self.parameters}
                named |= {name: value for name, value in known.items() if name not in taken}
            elif parameter.kind in _KEYWORD and parameter.name in known:
                named[parameter.name] = known[parameter.name]
            elif index < len(first_two) and parameter.kind is not inspect.Parameter.KEYWORD_ONLY and not named:
                positional.append(first_two[index])
            elif index < len(first_two) and parameter.kind in _KEYWORD:
                named[parameter.name] = first_two[index]
            elif parameter.default is inspect.Parameter.empty and parameter.kind in _KEYWORD:
                have = ", ".join(columns) or "none"
                raise TypeError(f"the reward requires {parameter.name!r}, the data set's columns are: {have}")
        return self.function(*positional, **named)


def _is_chat(annotation: Any) -> bool:
    """Whether the annotation, which may be text, is of one list of messages per answer."""
    return str(annotation).lower().replace("typing.", "").replace(" ", "").startswith("list[list[dict")


def _fields(item: ScoreItem) -> dict[str, Any]:
    return {name: getattr(item, name) for name in item.__struct_fields__}


TRACE_CHARACTERS, MOST_TRACES = 4000, 20
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    {*(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")), _PACKAGE}
)
# Not KeyError or AssertionError: they also follow from the answer of an overloaded service.
_MISTAKES = (ArithmeticError, AttributeError, ImportError, NameError, NotImplementedError, SyntaxError, TypeError)
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH)
SHORT = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # processes, memory, open files: for a while


def describe(error: BaseException, function: Any = None) -> str:
    """One line: what was raised, and the innermost line of the user's own files, else where ``function`` is defined."""
    text = _shown(error, lambda: f"{type(error).__name__}: {error}"[:400])
    place = _place(error) or _defined(function)
    return f"{text} ({place})" if place else text


def trace(error: BaseException) -> str:
    """The traceback as Python prints it, without the frames of this package; its end where it is long."""

    def text() -> str:
        shown = traceback.TracebackException.from_exception(error)
        shown.stack[:] = [frame for frame in shown.stack if not frame.filename.startswith(_PACKAGE)]
        return "".join(shown.format())[-TRACE_CHARACTERS:]

    return _shown(error, text)


def _shown(error: BaseException, text: Callable[[], str]) -> str:
    try:
        return text().encode(errors="replace").decode()  # half a surrogate pair cannot be sent
    except Exception:  # fault boundary: even the message of a user's exception is user code  # noqa: BLE001
        return type(error).__name__


def cause_of(error: BaseException, *, alone: bool) -> Cause:
    """Why user code failed. ``alone``: it uses nothing outside, so what it raises, it raises again."""
    for each in _chain(error):
        refused = isinstance(each, ConnectionError | socket.gaierror)
        if refused or (isinstance(each, OSError) and each.errno in _UNREACHABLE):
            return Cause.UNREACHABLE
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in SHORT):
        return Cause.OTHER
    return Cause.CODE if alone or isinstance(error, _MISTAKES) else Cause.OTHER


@dataclass(slots=True)
class Traces:
    """Logs tracebacks of user code, once for each type and line."""

    _logged: set[tuple[str, str]] = field(default_factory=set)

    def log(self, what: str, detail: str, text: str) -> None:
        """``detail`` is what `describe` returned for ``what``, ``text`` its traceback."""
        where = (detail.partition(":")[0], detail.rpartition("(")[2])
        if where not in self._logged and len(self._logged) < MOST_TRACES:
            self._logged.add(where)
            log.info("%s failed: %s", what, detail)
            for line in text.splitlines():  # a record has one line
                log.info("    %s", line)


def _chain(error: BaseException | None, depth: int = 8) -> Iterator[BaseException]:
    """``error`` and what it was raised from: libraries wrap the errors of their connections."""
    if error is None or depth == 0:
        return
    yield error
    yield from _chain(error.__cause__ or error.__context__, depth - 1)
    for part in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        yield from _chain(part, depth - 1)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def _defined(function: Any) -> str:
    try:
        return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    except (OSError, TypeError):  # compiled, an object that is called, or the file has changed
        return ""
