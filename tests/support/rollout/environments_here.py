"""Environments of `multi_turn` without a worker process: the code of a worker in the event loop of a test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.conversations import Answer, Played
from areal_lora.rollout.environment_child import failure, turn
from areal_lora.rollout.environment_kinds import MultiTurn
from areal_lora.types import Cause

factory: Callable[..., Any]


def played_here(environment: Callable[..., Any], **arguments: Any) -> Played:
    """Plays episodes of ``environment(**arguments)``; its errors are those of a worker."""
    vars(sys.modules[__name__])["factory"] = environment
    kind = MultiTurn({"path": "", "env": f"{__name__}:factory", "args": arguments, "max_turns": None})

    async def play(fields: Mapping[str, Any], answer: Answer) -> object:
        try:
            sample = SimpleNamespace(**fields["sample"])
            return await kind.play(SimpleNamespace(sample=sample, answer=lambda reply: answer(turn(reply))))
        except GenerationFault:
            raise
        except Exception as error:
            found = failure(error)
            raise GenerationFault(FaultKind.ENVIRONMENT, found["error"], Cause(found["cause"])) from error

    return play
