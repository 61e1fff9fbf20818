"""Agents as users write them, without the package; they run in a worker's interpreter."""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
from fractions import Fraction
from typing import Any


def blocks(task: Any) -> float:
    """Upper-case letters of one answer."""
    body = {"model": task.model, "messages": [{"role": "user", "content": task.sample.answer}]}
    headers = {"Authorization": f"Bearer {task.api_key}"}
    request = urllib.request.Request(f"{task.base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return float(sum(map(str.isupper, json.load(response)["choices"][0]["message"]["content"])))


async def right(task: Any) -> bool:
    return blocks(task) == 2


async def unscored(task: Any) -> None:
    blocks(task)


async def no_number(task: Any) -> float:
    return blocks(task) * float("nan")


async def parts(task: Any) -> dict[str, Any]:
    return {"letters": blocks(task), "brief": Fraction(1, 4), "correct": True}


async def parts_and_reward(task: Any) -> dict[str, Any]:
    return {"reward": blocks(task) / 8, "letters": 2, "correct": False}


async def wrong_parts(task: Any) -> dict[str, Any]:
    return {"letters": blocks(task) == 2, "brief": 1}


def text(task: Any) -> str:
    return str(blocks(task))


async def fails(task: Any) -> float:
    raise ValueError(f"no idea of {task.sample.uid}")


async def undecodable(task: Any) -> float:
    raise ValueError(b"caf\xe9".decode(errors="surrogateescape"))


async def exits(task: Any) -> float:
    sys.exit("no such model")


async def is_its_own_cause(task: Any) -> float:
    try:
        raise ValueError("no answer")
    except ValueError as error:
        raise error from error


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise KeyError("detail")


async def unspeakable(task: Any) -> float:
    raise Unspeakable


NOT_CALLABLE = 3


MEET = 40  # Python's own executor has at most 32 threads
_met = threading.Barrier(MEET)


def meets(task: Any) -> float:
    """Ends when so many samples run at once; blocks its thread until then."""
    _met.wait(timeout=120)
    return 1.0
