"""Samples of real OpenEnv servers, played by real workers; the model's endpoint has scripted answers.

That hides tokens and their log-probabilities, which are those of any agent's session.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pydantic import TypeAdapter

from areal_lora.config.models import WorkflowConfig
from areal_lora.data.prompts import Sample
from areal_lora.rollout.agents import AgentResult, AgentTask
from areal_lora.rollout.environment_workers import EnvironmentWorkers
from areal_lora.tasks.reward_calls import Score
from tests.support.rollout.real_environments import environments_python, openenv_server
from tests.support.rollout.texts import FIELDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SAMPLE = Sample(uid="train/0", prompt="the row", answer="42")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with openenv_server(tmp_path_factory.mktemp("apps")) as url:
        yield url


@contextmanager
def endpoint(answers: list[dict[str, Any]]) -> Iterator[tuple[str, list[list[dict[str, Any]]]]]:
    """URL of a model with these answers, the last one for ever; messages of each request."""
    requests, turns = list[list[dict[str, Any]]](), itertools.count()

    class Model(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append([*body["messages"], *body.get("tools", [])])
            message = {"role": "assistant"} | answers[min(next(turns), len(answers) - 1)]
            reply = json.dumps({"choices": [{"message": message}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", requests
        server.shutdown()


def play(
    url: str, answers: list[dict[str, Any]], *, n_samples: int = 1, max_turns: int | None = None, **args: Any
) -> tuple[list[AgentResult], list[list[dict[str, Any]]]]:
    python = str(environments_python())
    chosen = {"kind": "openenv", "env": url, "args": args, "python": python, "max_turns": max_turns}

    async def main(base_url: str) -> list[AgentResult]:
        task = AgentTask(base_url=base_url, api_key="k", model="m", sample=SAMPLE, timeout_s=60)
        async with EnvironmentWorkers(TypeAdapter[Any](WorkflowConfig).validate_python(chosen), FIELDS) as workers:
            return await asyncio.gather(*(workers.play(task) for _ in range(n_samples)))

    with endpoint(answers) as (base_url, requests):
        return asyncio.run(main(base_url)), requests


def rewards(results: list[AgentResult]) -> list[float | None]:
    assert {one.finish_reason for one in results} == {""}
    return [one.reward.reward if isinstance(one.reward, Score) else None for one in results]


def test_rewards_of_steps_are_added_up_and_samples_wait_for_a_session(served: str) -> None:
    """The server has room for one session at a time."""
    scores, requests = play(f"{served}/letters", [{"content": "ABc"}], n_samples=3, greeting="Hi ")
    assert rewards(scores) == [4.0, 4.0, 4.0]
    ends = [tuple(message["content"] for message in messages) for messages in requests]
    assert sorted(ends) == [("Hi 42",)] * 3 + [("Hi 42", "ABc", "more")] * 3


def test_an_episode_that_its_turns_end_is_cut_off(served: str) -> None:
    (result,), _ = play(f"{served}/letters", [{"content": "ABc"}], max_turns=1)
    assert result.finish_reason == "max_turns"
    assert isinstance(result.reward, Score)
    assert result.reward.reward == 2.0


def test_an_answer_has_the_fields_of_an_action_and_the_model_reads_why_it_is_none(served: str) -> None:
    answers = [{"content": text} for text in ("two", "[2]", '{"a": 1}', '{"a": 1, "b": 2}')]
    scores, requests = play(f"{served}/sums", answers)
    assert rewards(scores) == [3.0]
    assert requests[0] == [{"role": "user", "content": "the row"}]
    errors = [message["content"] for message in requests[-1] if message["role"] == "user"][1:]
    assert all(error.startswith("error: ") and error.endswith(": a, b") for error in errors)
    assert len(errors) == 3


def test_tools_are_the_models_and_the_configured_reward_scores_its_answer(served: str) -> None:
    calls = [
        {"id": str(n), "type": "function", "function": {"name": "add", "arguments": arguments}}
        for n, arguments in enumerate(('{"a": 2, "b": 3}', "{"))
    ]
    scores, requests = play(f"{served}/tools", [{"content": None, "tool_calls": calls}, {"content": "5"}])
    assert rewards(scores) == [None]
    (tool,) = (one["function"] for one in requests[0] if "function" in one)
    assert (tool["name"], tool["description"]) == ("add", "Add two whole numbers.")
    assert set(tool["parameters"]["properties"]) == {"a", "b"}
    results = [message for message in requests[1] if message.get("role") == "tool"]
    assert [message["tool_call_id"] for message in results] == ["0", "1"]
    assert '"5"' in results[0]["content"]
    assert results[1]["content"].startswith("error: ")
