"""Routes that a real server returns: those of Hugging Face's routers, of the version that read each token."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import save

from areal_lora.families.shape import read_shape
from tests.support.clocks import seen
from tests.support.engine.vllm_ext.second_server import SECOND_RUNNER
from tests.support.engine.vllm_ext.serving import (
    ALPHA,
    PROMPT,
    RANK,
    RunningServer,
    Tensors,
    merged_model,
    running_server,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VERSIONS = 6
"""Versions that interrupt answers; the oracle reads a model for each."""
SHORT = 12 if SECOND_RUNNER in os.environ else 40
"""Tokens of an answer; an interpreted step takes ten times as long."""
MARGIN = 1e-3
"""Between the logits of the last expert that a token uses and of the first that it does not: rounding is far below."""


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("routes") / "run"
    how = {"router_replay": "rollout", "in_flight": "interrupt", "max_staleness": 1}
    with running_server(folder, tiny_model, **how) as running:
        yield running


class Oracle:
    """Publishes versions, and compares routes with those of Hugging Face's model in float32."""

    def __init__(self, server: RunningServer) -> None:
        self.server, self.tensors, self.merged = server, dict[int, Tensors](), dict[int, Any]()
        self.compared = self.unclear = 0

    def publish(self) -> None:
        version = self.server.newest.version + 1 if self.server.newest else 0
        self.tensors[version] = self.server.adapter(300 + version)
        self.server.publish(self.tensors[version], version)

    def of_version(self, version: int) -> Any:
        if version not in self.merged:
            tensors = {name: t.clone() for name, t in self.tensors[version].items()}
            self.merged[version] = merged_model(self.server.model, save(tensors), ALPHA / RANK)
        return self.merged[version]

    def check(self, prompt: list[int], choice: dict[str, Any], prompt_routes: str) -> int:
        """All tokens but the last, which no version has read, have a route; returns the number of versions.

        Those of the prompt are of the version of the first choice.
        """
        columns = choice["columns"]
        ids = prompt + np.frombuffer(base64.b64decode(columns["token_ids"]), "<i4").tolist()
        runs = np.frombuffer(base64.b64decode(columns["versions"]), "<i4").reshape(-1, 2)
        sampled_by = runs[:, 0].repeat(runs[:, 1])
        shape = read_shape(self.server.model).routes
        flat = b"".join(map(base64.b64decode, (prompt_routes, columns["routes"])))
        got = np.frombuffer(flat, shape.dtype).reshape(len(ids), shape.layers, shape.per_token).astype(int)
        assert (got[-1] == 255).all()
        assert got[:-1].max() < shape.experts
        read_by = sampled_by[np.maximum(0, np.arange(len(ids) - 1) + 1 - len(prompt))]
        for version in set(sampled_by.tolist()):
            with torch.no_grad():
                logits = torch.stack(
                    self.of_version(version)(torch.tensor([ids[:-1]]), output_router_logits=True).router_logits, 1
                )
            best = logits.topk(shape.per_token + 1, dim=-1)
            clear = (best.values[..., -2] - best.values[..., -1] > MARGIN).numpy()
            own = (read_by == version) & (np.arange(len(read_by)) >= (len(prompt) if choice["index"] else 0))
            mine = own[:, None] & clear
            want = np.sort(best.indices[..., :-1].numpy(), axis=-1)
            assert (np.sort(got[:-1], axis=-1)[mine] == want[mine]).all(), f"routes are not of version {version}"
            self.compared += int(mine.sum())
            self.unclear += int((own[:, None] & ~clear).sum())
        return len(runs)


@pytest.fixture
def oracle(server: RunningServer) -> Oracle:
    made = Oracle(server)
    made.publish()
    return made


async def answers(server: RunningServer, prompt: list[int], **more: Any) -> list[dict[str, Any]]:
    form = {"model": "math", "max_tokens": SHORT, "ignore_eos": True, "logprobs": 0, "seed": 7, "return_columns": True}
    async with aiohttp.ClientSession() as session:
        status, answer = await server.post(session, prompt=prompt, **form | more)
    assert status == 200, answer
    found: list[dict[str, Any]] = answer["choices"]
    return found


def test_routes_are_those_of_hugging_face(server: RunningServer, oracle: Oracle) -> None:
    """Groups at once, of prompts within a block of the KV cache, of whole blocks and between; then from its cache."""
    prompts = [PROMPT[:n] for n in (9, 32, 33)] + [PROMPT]

    async def groups() -> list[list[dict[str, Any]]]:
        return await asyncio.gather(*(answers(server, prompt, n=3) for prompt in prompts))

    first, cached = asyncio.run(groups()), asyncio.run(groups())
    for prompt, made, again in zip(prompts, first, cached, strict=True):
        assert [("prompt_routes" in choice) for choice in made] == [True, False, False], "once for a prompt"
        assert made[0]["prompt_routes"] == again[0]["prompt_routes"]
        for choice in made + again:
            oracle.check(prompt, choice, made[0]["prompt_routes"])
    assert oracle.unclear < 0.05 * oracle.compared, "too few tokens are compared"


def test_a_cached_answer_keeps_its_routes(server: RunningServer, oracle: Oracle) -> None:
    """The next turn of a conversation starts with it; tokens of messages between have routes as part of the prompt."""
    (turn,) = asyncio.run(answers(server, PROMPT))
    ids = np.frombuffer(base64.b64decode(turn["columns"]["token_ids"]), "<i4").tolist()
    longer = PROMPT + ids + PROMPT[:11]
    (reply,) = asyncio.run(answers(server, longer))
    oracle.check(longer, reply, reply["prompt_routes"])
    before = b"".join(map(base64.b64decode, (turn["prompt_routes"], turn["columns"]["routes"])))
    width = len(before) // (len(PROMPT) + len(ids))
    assert base64.b64decode(reply["prompt_routes"])[: len(before) - width] == before[:-width]
    for n in (1, len(before) // width - 1, len(longer) - 1):
        (rest,) = asyncio.run(answers(server, longer, routes_from=n))
        assert rest["columns"] == reply["columns"]
        assert base64.b64decode(rest["prompt_routes"]) == base64.b64decode(reply["prompt_routes"])[n * width :]


def test_each_part_of_an_interrupted_answer_has_the_routes_of_its_version(
    server: RunningServer, oracle: Oracle
) -> None:
    async def run() -> list[list[dict[str, Any]]]:
        running = [
            asyncio.create_task(answers(server, [10 + k, 20, 30, 40 + k], n=2, max_tokens=200, seed=k))
            for k in range(4)
        ]
        for _ in range(VERSIONS):
            if not all(task.done() for task in running):
                await asyncio.to_thread(oracle.publish)
        return [await task for task in running]

    def versions() -> list[int]:
        found = asyncio.run(run())
        return [
            oracle.check([10 + k, 20, 30, 40 + k], choice, made[0]["prompt_routes"])
            for k, made in enumerate(found)
            for choice in made
        ]

    seen(versions, lambda found: max(found) > 1)  # an answer was interrupted


def test_an_answer_that_a_stop_text_ends_has_its_routes(server: RunningServer, oracle: Oracle) -> None:
    seeds = iter(range(7, 17))

    def whole_answer() -> tuple[dict[str, Any], dict[str, Any], str]:
        drawn = {"temperature": 0.5, "seed": next(seeds)}
        (whole,) = asyncio.run(answers(server, PROMPT, **drawn))
        return drawn, whole, next((c for c in whole["text"][5:] if c.isascii() and whole["text"].index(c) > 3), "")

    drawn, whole, stop = seen(whole_answer, lambda found: found[2])
    (cut,) = asyncio.run(answers(server, PROMPT, **drawn, stop=[stop]))
    assert cut["finish_reason"] == "stop"
    assert len(cut["columns"]["token_ids"]) < len(whole["columns"]["token_ids"])
    oracle.check(PROMPT, cut, cut["prompt_routes"])


def test_an_evaluation_has_no_routes(server: RunningServer, oracle: Oracle) -> None:
    (choice,) = asyncio.run(answers(server, PROMPT, model=str(server.newest), pin_version=True))
    assert "routes" not in choice["columns"]
    assert "prompt_routes" not in choice
