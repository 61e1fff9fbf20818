"""Policy ``keep`` on a real server: running sequences change to newer versions and keep their KV caches."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import save

from areal_lora.errors import ManifestError
from areal_lora.families.shape import read_shape
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.manifest import base_digest
from areal_lora.weight_sync.messages import ServerStats
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

INTERPRETED = 60
"""Tokens of an answer where a step takes ten times as long, since kernels are interpreted."""
LONG = INTERPRETED if SECOND_RUNNER in os.environ else 200
"""Tokens of an answer; a version stays for a part of it."""
SEQUENCES = 8  # at once
MARGIN = 1e-3
"""Between the logits of the last expert that a token uses and of the first that it does not: rounding is far below."""


def served(folder: Path, model: Path, **how: Any) -> Iterator[RunningServer]:
    kept = {"in_flight": "keep", "max_staleness": 1, "max_num_seqs": SEQUENCES}
    with running_server(folder, model, **kept, **how) as running:
        yield running


@pytest.fixture(scope="module")
def server(even_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    yield from served(tmp_path_factory.mktemp("keep") / "run", even_model, further=[{"name": "other"}])


class KeepOracle:
    """Publishes versions. Computes a sequence in float64 with Hugging Face's models, one after another on one cache."""

    def __init__(self, server: RunningServer) -> None:
        self.server, self._models = server, dict[int, Any]()

    def publish(self) -> int:
        version = self.server.newest.version + 1 if self.server.newest else 0
        self.server.publish(self.tensors(version))
        return version

    def tensors(self, version: int) -> Tensors:
        return self.server.adapter(500 + version)

    def model(self, version: int) -> Any:
        if version not in self._models:
            merged = merged_model(self.server.model, save(self.tensors(version)), ALPHA / RANK)
            self._models[version] = deepcopy(merged).double()
            self._models[version].set_experts_implementation("eager")  # others have no float64
        return self._models[version]

    def computed(self, prompt: list[int], ids: list[int], versions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [answer] of ``ids``, and logits of all routers [P + answer - 1, layers, experts].

        What samples token t of the answer reads token t - 1: that token's key and value are of t's version.
        """
        row, first = prompt + ids, len(prompt)
        bounds = [0, *(first + t - 1 for t in range(1, len(ids)) if versions[t] != versions[t - 1]), len(row) - 1]
        cache, logits, routers = None, list[torch.Tensor](), list[torch.Tensor]()
        for begin, end in pairwise(bounds):
            with torch.no_grad():
                made = self.model(versions[max(0, begin + 1 - first)])(
                    torch.tensor([row[begin:end]]), past_key_values=cache, use_cache=True, output_router_logits=True
                )
            cache = made.past_key_values
            logits.append(made.logits[0])
            routers.append(torch.stack(made.router_logits, 1))
        scores = torch.cat(logits).double().log_softmax(-1)[first - 1 :]
        return scores.gather(1, torch.tensor(ids)[:, None])[:, 0], torch.cat(routers)

    def check(self, prompt: list[int], choice: dict[str, Any]) -> int:
        """Every token is of the versions that it names; returns how many there are."""
        ids, versions = choice["token_ids"], choice["versions"]
        got = choice["logprobs"]["token_logprobs"]
        assert len(ids) == len(versions) == len(got)
        assert versions == sorted(versions)
        want, _ = self.computed(prompt, ids, versions)
        off = (torch.tensor(got, dtype=torch.float64) - want).abs().max().item()
        assert off < 1e-4, f"{off} of versions {sorted(set(versions))}"
        return len(set(versions))

    def stats(self) -> ServerStats:
        return self.server.admin.info(120.0).stats

    async def requested(self, n: int) -> None:
        while (await asyncio.to_thread(self.stats)).requests < n:
            await asyncio.sleep(0.005)


@pytest.fixture
def oracle(server: RunningServer) -> KeepOracle:
    made = KeepOracle(server)
    made.publish()
    return made


def body(**more: Any) -> dict[str, Any]:
    form = {"model": "math", "prompt": PROMPT, "max_tokens": LONG, "ignore_eos": True, "logprobs": 0}
    return form | {"return_token_ids": True, "temperature": 0.0} | more


async def answer(server: RunningServer, **more: Any) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession() as session:
        status, got = await server.post(session, **body(**more))
    assert status == 200, got
    choices: list[dict[str, Any]] = got["choices"]
    return choices


def during(
    oracle: KeepOracle, *bodies: dict[str, Any], publishes: int = 1, happened: Callable[[list[dict[str, Any]]], bool]
) -> list[dict[str, Any]]:
    """The answer to each request, of the first run with as many publishes beside them in which it happened."""

    async def run() -> list[dict[str, Any]]:
        before = (await asyncio.to_thread(oracle.stats)).requests
        tasks = [asyncio.create_task(answer(oracle.server, **more)) for more in bodies]
        await oracle.requested(before + len(bodies))
        for _ in range(publishes):
            await asyncio.to_thread(oracle.publish)
        return [(await task)[0] for task in tasks]

    return seen(lambda: asyncio.run(run()), happened)


def changed_before(n: int) -> Callable[[list[dict[str, Any]]], bool]:
    """The only answer has two versions, and more than ``n`` tokens of the second one."""
    return lambda found: len(set(v := found[0]["versions"])) == 2 and v.count(max(v)) > n


def test_a_running_answer_changes_its_version_and_keeps_its_cache(server: RunningServer, oracle: KeepOracle) -> None:
    """The old version alone up to the change, bit for bit; then both; nothing is computed again."""
    before = oracle.stats()
    (choice,) = during(oracle, {}, happened=changed_before(LONG // 10))  # its last tokens may be equal by chance
    old, new = sorted(set(choice["versions"]))
    change = choice["versions"].index(new)
    assert oracle.check(PROMPT, choice) == 2
    (alone,) = asyncio.run(answer(server, model=f"math@v{old}", pin_version=True))
    for name, values in (("token_ids", choice["token_ids"]), ("logprobs", choice["logprobs"]["token_logprobs"])):
        same = alone[name] if name == "token_ids" else alone[name]["token_logprobs"]
        assert values[:change] == same[:change], name
        assert values[change:] != same[change:], name
    exact, _ = oracle.computed(PROMPT, choice["token_ids"], [old] * change + [new] * (LONG - change))
    again, _ = oracle.computed(PROMPT, choice["token_ids"], [new] * LONG)
    assert (exact - again)[change:].abs().max() > 1e-2, "the cache makes no difference: the test shows nothing"
    after = oracle.stats()
    assert (after.interrupted, after.recomputed_tokens, after.aborted) == (
        before.interrupted,
        before.recomputed_tokens,
        before.aborted,
    )


def test_an_answer_after_the_commit_is_of_the_new_version_alone(server: RunningServer, oracle: KeepOracle) -> None:
    """Prompts that the mixed answer has computed, of the versions before and after it: no block of it is used."""
    (choice,) = during(oracle, {}, happened=changed_before(64))  # some whole blocks are mixed
    old, new = sorted(set(choice["versions"]))
    for more, version in (({}, new), ({"model": f"math@v{old}", "pin_version": True}, old)):
        for prompt in (PROMPT, PROMPT + choice["token_ids"][:-1]):
            (got,) = asyncio.run(answer(server, prompt=prompt, max_tokens=8, **more))
            assert set(got["versions"]) == {version}
            assert oracle.check(prompt, got) == 1


def test_a_prompt_is_computed_again_beside_a_running_answer_to_it(server: RunningServer, oracle: KeepOracle) -> None:
    """A group shares the computation of its prompt; an answer of a newer version does not."""

    async def run() -> tuple[bool, dict[str, Any], dict[str, Any]]:
        before = (await asyncio.to_thread(oracle.stats)).requests
        task = asyncio.create_task(answer(server))
        await oracle.requested(before + 1)
        await asyncio.to_thread(oracle.publish)
        (late,) = await answer(server, max_tokens=8)
        return not task.done(), late, (await task)[0]

    beside, late, running = seen(
        lambda: asyncio.run(run()), lambda found: found[0] and len(set(found[2]["versions"])) > 1
    )
    assert beside
    assert set(late["versions"]) == {max(running["versions"])}
    assert oracle.check(PROMPT, late) == 1


def test_sequences_without_a_token_start_again(server: RunningServer, oracle: KeepOracle) -> None:
    """They wait for a place as versions come: all their tokens are of versions that have read all before."""
    before = oracle.stats()
    bodies = [{"prompt": [*PROMPT, k]} for k in range(3 * SEQUENCES)]

    def waited(found: list[dict[str, Any]]) -> bool:
        mixed = any(len(set(choice["versions"])) > 1 for choice in found)
        return mixed and len({choice["versions"][0] for choice in found}) > 1

    for more, choice in zip(bodies, during(oracle, *bodies, publishes=4, happened=waited), strict=True):
        oracle.check(more["prompt"], choice)
    assert oracle.stats().recomputed_tokens == before.recomputed_tokens


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_names_the_version_of_each_token(server: RunningServer, oracle: KeepOracle, n: int) -> None:
    streamed = body(n=n, seed=3, temperature=1.0, stream=True)

    async def run() -> list[dict[str, Any]]:
        events = []
        async with aiohttp.ClientSession() as session:
            async with session.post(server.url("/v1/completions"), json=streamed) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        events.append(json.loads(line.removeprefix(b"data: ")))
                    if len(events) in (30, 90):
                        await asyncio.to_thread(oracle.publish)
        return events

    def wholes(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        made = []
        for index in range(n):
            parts = [c for e in events for c in e["choices"] if c["index"] == index]
            whole: dict[str, Any] = {k: [x for p in parts for x in p.get(k) or []] for k in ("token_ids", "versions")}
            whole["logprobs"] = {"token_logprobs": [x for p in parts for x in p["logprobs"]["token_logprobs"]]}
            made.append(whole)
        return made

    events = seen(lambda: asyncio.run(run()), lambda e: all(len(set(w["versions"])) > 1 for w in wholes(e)))
    for whole in wholes(events):
        assert len(whole["token_ids"]) == LONG
        assert oracle.check(PROMPT, whole) > 1


def test_another_adapter_is_left_alone(server: RunningServer, oracle: KeepOracle) -> None:
    ref = AdapterRef(name="other", version=0)
    if str(ref) not in server.admin.info(120.0).refs:
        tensors = server.adapter(7)
        layout = server.layout(tensors, server.config.adapters[1].spec(str(server.model)))
        server.source.publish(ref, layout, tensors, base=base_digest(server.model))
    (alone,) = asyncio.run(answer(server, model="other"))

    async def run() -> tuple[dict[str, Any], dict[str, Any]]:
        before = (await asyncio.to_thread(oracle.stats)).requests
        both = [asyncio.create_task(answer(server, model=model)) for model in ("other", "math")]
        await oracle.requested(before + 2)
        await asyncio.to_thread(oracle.publish)
        return (await both[0])[0], (await both[1])[0]

    other, mixed = seen(lambda: asyncio.run(run()), lambda found: len(set(found[1]["versions"])) > 1)
    assert oracle.check(PROMPT, mixed) > 1
    assert (other["token_ids"], other["logprobs"]) == (alone["token_ids"], alone["logprobs"])
    assert set(other["versions"]) == {0}


@pytest.fixture
def replaying(tiny_model: Path, tmp_path: Path) -> Iterator[RunningServer]:
    yield from served(tmp_path / "run", tiny_model, router_replay="rollout")


def test_routes_are_of_the_version_that_read_each_token(replaying: RunningServer) -> None:
    server, oracle = replaying, KeepOracle(replaying)
    oracle.publish()
    more = {"return_columns": True, "return_token_ids": False}

    def runs(choice: dict[str, Any]) -> np.ndarray:
        return np.frombuffer(base64.b64decode(choice["columns"]["versions"]), "<i4").reshape(-1, 2)

    async def run() -> dict[str, Any]:
        before = (await asyncio.to_thread(oracle.stats)).requests
        task = asyncio.create_task(answer(server, **more))
        await oracle.requested(before + 1)
        for _ in range(2):
            await asyncio.to_thread(oracle.publish)
        return (await task)[0]

    choice = seen(lambda: asyncio.run(run()), lambda choice: len(runs(choice)) > 1)
    ids = np.frombuffer(base64.b64decode(choice["columns"]["token_ids"]), "<i4").tolist()
    versions = runs(choice)[:, 0].repeat(runs(choice)[:, 1]).tolist()
    shape = read_shape(server.model).routes
    flat = b"".join(map(base64.b64decode, (choice["prompt_routes"], choice["columns"]["routes"])))
    got = np.frombuffer(flat, shape.dtype).reshape(-1, shape.layers, shape.per_token).astype(int)[:-1]
    best = oracle.computed(PROMPT, ids, versions)[1].topk(shape.per_token + 1, dim=-1)
    clear = (best.values[..., -2] - best.values[..., -1] > MARGIN).numpy()
    assert clear.mean() > 0.9
    want = np.sort(best.indices[..., :-1].numpy(), axis=-1)
    assert (np.sort(got, axis=-1)[clear] == want[clear]).all()


def test_a_refused_version_changes_nothing(server: RunningServer, oracle: KeepOracle) -> None:
    async def run() -> tuple[dict[str, Any], bool]:
        before = (await asyncio.to_thread(oracle.stats)).requests
        task = asyncio.create_task(answer(server))
        await oracle.requested(before + 1)
        newest = server.newest
        with pytest.raises(ManifestError):
            await asyncio.to_thread(server.publish, {n: t * float("nan") for n, t in server.adapter(1).items()})
        server.newest = newest
        running = not task.done()
        return (await task)[0], running

    choice, _ = seen(lambda: asyncio.run(run()), lambda found: found[1])
    assert oracle.check(PROMPT, choice) == 1


def test_versions_that_no_sequence_is_on_leave_their_slots(server: RunningServer, oracle: KeepOracle) -> None:
    """More versions than slots pass under one answer, and a publish never waits for it."""
    (choice,) = during(oracle, {}, publishes=6, happened=lambda found: len(set(found[0]["versions"])) > 3)
    assert oracle.check(PROMPT, choice) > 3


def test_answers_on_a_lost_version_end_even_if_the_next_one_has_its_name(
    server: RunningServer, oracle: KeepOracle
) -> None:
    """The next session of the trainer resumes from an older version, and first makes one of the lost one's number."""
    prompts = [[*PROMPT, k] for k in range(3 * SEQUENCES)]
    lost = oracle.publish()

    async def run() -> list[tuple[int, dict[str, Any]]]:
        nonlocal lost
        lost = await asyncio.to_thread(oracle.publish)
        before = (await asyncio.to_thread(oracle.stats)).requests
        async with aiohttp.ClientSession() as session:
            tasks = [asyncio.create_task(server.post(session, **body(prompt=prompt))) for prompt in prompts]
            await oracle.requested(before + len(tasks))
            server.source.session += 1
            await asyncio.to_thread(server.publish, server.adapter(900 + lost), lost)
            return [await task for task in tasks]

    found = seen(lambda: asyncio.run(run()), lambda answers: any(status == 404 for status, _ in answers))
    assert {status for status, _ in found} in ({404}, {200, 404}), "all answers were of the lost version"
    for prompt, (status, got) in zip(prompts, found, strict=True):
        if status == 200:  # before the next session
            assert oracle.check(prompt, got["choices"][0]) == 1
        else:
            assert f"math@v{lost}" in got["error"]["message"]
    (new,) = asyncio.run(answer(server, max_tokens=8))
    want = server.logprobs(server.adapter(900 + lost), PROMPT + new["token_ids"])[len(PROMPT) :]
    assert set(new["versions"]) == {lost}
    assert np.abs(np.array(new["logprobs"]["token_logprobs"]) - want).max() < 1e-4
