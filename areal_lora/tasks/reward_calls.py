"""Call a reward function with the arguments that it names.

A function takes any of ``completion``, ``answer`` (or ``gold``), ``prompt``, ``messages``, ``columns``, ``n_tokens``
and ``finish_reason``, and columns of the data set by name; ``**kwargs`` gets everything. A function that names neither
``completion`` nor ``completions`` gets the completion and the answer in its first two parameters.

A coroutine function scores the answers of a batch concurrently. A function with a parameter ``completions`` scores a
batch at once: every argument is a list with one entry per answer, as TRL calls its rewards, and it returns a list.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from areal_lora.errors import ConfigError
from areal_lora.tasks.score_item import ScoreItem

_BATCHED = {"completions": "completion", "answers": "answer", "prompts": "prompt", "finish_reasons": "finish_reason"}
_FIX = "name a function reward(completion, answer) that returns a number"
_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


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
    def of(cls, function: Any, name: str, take_costs: Callable[[], dict[str, float]] = dict) -> RewardCall:
        """Raises ConfigError for what cannot be called as a reward."""
        if not callable(function):
            raise ConfigError(name, f"is of type {type(function).__name__}, not a function", _FIX)
        try:
            parameters: tuple[inspect.Parameter, ...] | None = tuple(inspect.signature(function).parameters.values())
        except ValueError:
            parameters = None  # compiled functions may have no signature
        if parameters is not None:
            _check(parameters, name)
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
        fields |= {name: [values[name] for values in each] for name in ("messages", "columns", "n_tokens")}
        fields["answer"] = fields["answers"]
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
        known = {"gold": fields.get("answer"), **columns, **fields}
        explicit = any(p.name in ("completion", "completions") for p in self.parameters)
        first_two = [] if explicit else [fields["completion"], fields["answer"]]
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


def _fields(item: ScoreItem) -> dict[str, Any]:
    return {name: getattr(item, name) for name in item.__struct_fields__}


def _check(parameters: Sequence[inspect.Parameter], name: str) -> None:
    needed = [p for p in parameters if p.default is inspect.Parameter.empty]
    if any(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in needed[2:]):
        raise ConfigError(name, "has more than two parameters without a name", _FIX)
    if not parameters:
        raise ConfigError(name, "takes no arguments", _FIX)
