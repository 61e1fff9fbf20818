from __future__ import annotations

import errno
import json
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_lora.processes.loading import load_import_path
from areal_lora.tasks.reward_calls import TRACE_CHARACTERS, cause_of, describe, trace
from areal_lora.types import Cause

CODE = """import json

def inner(text):
    return json.loads(text)

def outer(text):
    return inner(text)
"""


def raised(function: Callable[..., Any], *arguments: Any) -> Exception:
    with pytest.raises(Exception) as error:  # noqa: PT011
        function(*arguments)
    return error.value


def test_the_line_named_is_the_innermost_of_the_users_own_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    outer = load_import_path(f"{file}:outer")
    error = raised(outer, "{")
    assert describe(error).endswith(f"({file}:4)"), "not the line inside json"
    assert "return inner(text)" in trace(error)
    assert describe(TypeError("x"), outer) == f"TypeError: x ({file}:6)", "where it is defined, if no frame is its own"
    assert describe(TypeError("x")) == "TypeError: x"


def test_texts_are_bounded_and_never_fail() -> None:
    class Nasty(Exception):
        def __str__(self) -> str:
            raise ValueError("even its text fails")

    assert describe(Nasty()) == "Nasty"
    assert "Nasty" in trace(Nasty())
    assert len(describe(ValueError("x" * 10_000))) < 500
    assert len(trace(ValueError("x" * 10_000))) <= TRACE_CHARACTERS


def _closed_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}/v1"


def _with_openai(url: str) -> None:
    import openai

    openai.OpenAI(base_url=url, api_key="x", max_retries=0).models.list()


def test_a_refused_connection_is_found_below_the_errors_of_libraries() -> None:
    url = _closed_port()
    for ask in (urllib.request.urlopen, _with_openai):
        assert cause_of(raised(ask, url), alone=False) is Cause.UNREACHABLE


@pytest.mark.parametrize(
    ("error", "outside", "alone"),
    [
        (NameError("a"), Cause.CODE, Cause.CODE),
        (KeyError("a"), Cause.OTHER, Cause.CODE),
        (ZeroDivisionError(), Cause.CODE, Cause.CODE),
        (json.JSONDecodeError("x", "", 0), Cause.OTHER, Cause.CODE),
        (RuntimeError("503"), Cause.OTHER, Cause.CODE),
        (TimeoutError(), Cause.OTHER, Cause.CODE),
        (MemoryError(), Cause.OTHER, Cause.OTHER),
        (BlockingIOError(errno.EAGAIN, "fork"), Cause.OTHER, Cause.OTHER),
        (OSError(errno.ENFILE, "open"), Cause.OTHER, Cause.OTHER),
        (FileNotFoundError(errno.ENOENT, "open"), Cause.OTHER, Cause.CODE),
        (ExceptionGroup("both", [OSError(errno.EHOSTUNREACH, "no route")]), Cause.UNREACHABLE, Cause.UNREACHABLE),
    ],
)
def test_an_error_that_may_pass_with_time_is_not_one_of_the_code(
    error: Exception, outside: Cause, alone: Cause
) -> None:
    assert (cause_of(error, alone=False), cause_of(error, alone=True)) == (outside, alone)
