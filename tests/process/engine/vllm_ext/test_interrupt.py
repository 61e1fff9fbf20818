"""Policy ``interrupt`` on a real server: sequences go on with newer versions, and say which token is of which.

Versions come over sockets here, as between machines; the other tests' trainers are on the server's machine.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoTokenizer

from areal_lora.errors import ManifestError
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.messages import ServerStats
from tests.support.clocks import seen
from tests.support.engine.vllm_ext.serving import PROMPT, RunningServer, Tensors, hf_logits, running_server
from tests.support.lazy import Lazy
from tests.support.weight_sync import SOCKETS

served_adapters = Lazy("areal_lora.engine.vllm_ext.server.adapters")
sampling = Lazy("areal_lora.engine.vllm_ext.server.sampling")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LONG = 200  # tokens of an answer; a version stays for a part of it
SEQUENCES = 16  # at once
LATE = "did not continue within"  # the server's warning: places of sequences that were cut were given away


@pytest.fixture(scope="module")
def server(even_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("interrupt") / "run"
    how = {"in_flight": "interrupt", "max_staleness": 1, "max_num_seqs": SEQUENCES}
    with running_server(folder, even_model, backend=SOCKETS, **how) as running:
        assert not running.source.connect().same_host
        yield running


class Versions:
    """Publishes versions and remembers what was in them."""

    def __init__(self, server: RunningServer) -> None:
        self.server, self.tensors = server, dict[int, Tensors]()
        self._logits: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}

    def publish(self) -> AdapterRef:
        seed = 100 + (self.server.newest.version + 1 if self.server.newest else 0)
        ref = self.server.publish(self.server.adapter(seed))
        self.tensors[ref.version] = self.server.adapter(seed)
        return ref

    async def requested(self, n: int) -> None:
        """Wait until the server has had ``n`` prompts."""
        while (await asyncio.to_thread(self.stats)).requests < n:
            await asyncio.sleep(0.005)

    def check(self, prompt: list[int], choice: dict[str, Any], temperature: float = 1.0) -> int:
        """Every token under the version it claims, by Hugging Face; how many versions there were."""
        ids, versions = choice["token_ids"], choice["versions"]
        logprobs = choice["logprobs"]["token_logprobs"]
        assert len(ids) == len(versions) == len(logprobs)
        assert versions == sorted(versions)
        tokens = torch.tensor(ids)[:, None]
        for version in set(versions):
            logits = hf_logits(self.server.model, self.tensors[version], prompt + ids)[len(prompt) - 1 : -1]
            want = (logits / temperature).log_softmax(-1).gather(1, tokens)[:, 0]
            off = max(abs(a - b.item()) for a, b, v in zip(logprobs, want, versions, strict=True) if v == version)
            assert off < 1e-4, f"a token is not of version {version}: {off}"
        return len(set(versions))

    def stats(self) -> ServerStats:
        return self.server.admin.info(120.0).stats


@pytest.fixture
def versions(server: RunningServer) -> Versions:
    known = Versions(server)
    known.publish()
    return known


def body(model: str = "math", **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": LONG,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "seed": 7,
    } | more


def test_every_token_is_of_the_version_it_claims(server: RunningServer, versions: Versions) -> None:
    """More versions than slots pass under every sequence; a publish never waits for one of them."""
    prompts = [[10 + k, 20, 30, 40 + k] for k in range(3)]

    async def run() -> tuple[ServerStats, list[Any]]:
        before = versions.stats()
        async with aiohttp.ClientSession() as session:
            asked = [
                asyncio.create_task(server.post(session, **body(prompt=p, n=2, seed=k, temperature=0.8)))
                for k, p in enumerate(prompts)
            ]
            await versions.requested(before.requests + len(prompts))
            come = 0
            async with session.post(server.url("/v1/completions"), json=body(stream=True)) as response:
                async for line in response.content:
                    parts = json.loads(line.removeprefix(b"data: "))["choices"] if line.startswith(b"data: {") else []
                    # The next version comes once this sequence has a token of the one before.
                    if come < 4 and server.newest.version in [v for p in parts for v in p.get("versions") or []]:
                        await asyncio.to_thread(versions.publish)
                        come += 1
            return before, [(await task)[1] for task in asked]

    def counts(found: tuple[ServerStats, list[Any]]) -> list[int]:
        return [len(set(choice["versions"])) for answer in found[1] for choice in answer["choices"]]

    # More versions than this server has slots.
    before, answers = found = seen(
        lambda: asyncio.run(run()), lambda found: min(counts(found)) >= 2 and max(counts(found)) > 3
    )
    after = versions.stats()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert [c["index"] for c in answer["choices"]] == [0, 1]
        assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 2 * LONG, "total_tokens": 4 + 2 * LONG}
        newest = max(v for c in answer["choices"] for v in c["versions"])
        assert answer["model"] == f"math@v{newest}"
        for choice in answer["choices"]:
            assert (len(choice["token_ids"]), choice["finish_reason"]) == (LONG, "length")
        assert versions.check(prompt, answer["choices"][1], 0.8) >= 2
        assert answer["choices"][0]["token_ids"] != answer["choices"][1]["token_ids"]
    assert after.interrupted - before.interrupted >= sum(n - 1 for n in counts(found))
    assert after.generated_tokens - before.generated_tokens == 7 * LONG
    assert after.prompt_tokens - before.prompt_tokens == 3 * 4 + len(PROMPT)
    least = sum(4 + c["versions"].index(v) for a in answers for c in a["choices"] for v in set(c["versions"][1:]))
    assert after.recomputed_tokens - before.recomputed_tokens >= least - sum(4 for _ in counts(found)) > 0
    assert (after.running, after.aborted) == (0, before.aborted)


def test_a_sequence_that_was_not_cut_is_what_finish_gives(server: RunningServer, versions: Versions) -> None:
    async def run() -> list[Any]:
        async with aiohttp.ClientSession() as session:
            return [(await server.post(session, **body(n=3, pin_version=p)))[1]["choices"] for p in (False, True)]

    cuttable, pinned = asyncio.run(run())
    assert [c["token_ids"] for c in cuttable] == [c["token_ids"] for c in pinned]


def test_a_continuation_draws_other_random_numbers(server: RunningServer, versions: Versions) -> None:
    """The rest of an answer is what a request for it alone gives with a seed of its own."""
    seed_of = sampling.continuation_seed  # imports vLLM, here: no idle connection outlasts that

    async def run() -> tuple[int, list[list[int]]] | None:
        before = versions.stats().requests
        async with aiohttp.ClientSession() as session:

            async def tokens(**more: Any) -> tuple[list[int], list[int]]:
                status, answer = await server.post(session, **body(**more))
                assert status == 200, answer
                return answer["choices"][0]["token_ids"], answer["choices"][0]["versions"]

            task = asyncio.create_task(tokens(seed=11))
            await versions.requested(before + 1)
            newest = await asyncio.to_thread(versions.publish)
            ids, of = await task
            if len(set(of)) < 2:
                return None
            cut = of.index(newest.version)
            rest = {"prompt": PROMPT + ids[:cut], "max_tokens": LONG - cut}
            alone = [(await tokens(seed=seed, **rest))[0] for seed in (seed_of(11, cut), 11)]
            return cut, [ids[cut:], *alone]

    cut, (rest, again, replayed) = seen(lambda: asyncio.run(run()), lambda found: found is not None) or (0, [])
    assert 0 < cut < LONG
    assert rest == again != replayed
    assert len({seed_of(seed, n) for seed in (7, 8) for n in range(500)}) == 1000


def test_evaluation_probe_and_prompt_scores_are_not_cut(server: RunningServer, versions: Versions) -> None:
    async def run() -> tuple[AdapterRef, Any, list[Any]] | None:
        ref = await asyncio.to_thread(versions.publish)
        before = versions.stats().requests
        async with aiohttp.ClientSession() as session:
            pinned = body(str(ref), prompt=[PROMPT, PROMPT[:9]], temperature=0.0, pin_version=True)
            asked = [
                asyncio.create_task(server.post(session, **pinned)),
                asyncio.create_task(server.post(session, **body(str(ref), echo=True))),
            ]
            await versions.requested(before + 3)
            newest = await asyncio.to_thread(versions.publish)
            during = not any(task.done() for task in asked)
            running_s = time.monotonic()
            while not all(task.done() for task in asked):
                running_s = running_s if asked[0].done() else time.monotonic()
                newest = await asyncio.to_thread(versions.publish)
                assert await asyncio.to_thread(server.score, newest) != []
            # Idle, older than what is kept otherwise, and still there for the next request of the evaluation.
            status, again = await server.post(session, **pinned)
            if not during or time.monotonic() - running_s > served_adapters.PINNED_S:
                return None
            assert status == 200, again
            return ref, again, [(await task)[1] for task in asked]

    found = seen(lambda: asyncio.run(run()), lambda found: found is not None)
    assert found is not None
    ref, again, both = found
    for answer in (*both, again):
        assert answer["model"] == str(ref)
        assert {v for c in answer["choices"] for v in c["versions"]} == {ref.version}
    assert [c["token_ids"] for c in both[0]["choices"]] == [c["token_ids"] for c in again["choices"]]


def test_requests_that_come_while_versions_change(server: RunningServer, versions: Versions) -> None:
    """Asked for by the name of a version that is retired already: the newest answers; never one that is older."""
    first = versions.tensors
    asked_for = str(AdapterRef(name="math", version=min(first)))

    async def client(k: int, stop: asyncio.Event, session: aiohttp.ClientSession, got: list[Any]) -> None:
        while not stop.is_set():
            prompt = [10 + k, 20, 30 + len(got) % 50]
            status, answer = await server.post(
                session, **body(asked_for, prompt=prompt, max_tokens=3 + 5 * k, seed=len(got))
            )
            assert status == 200, answer
            got.append((prompt, answer["choices"][0]))

    async def run() -> list[Any]:
        stop, got = asyncio.Event(), list[Any]()
        async with aiohttp.ClientSession() as session:
            clients = [asyncio.create_task(client(k, stop, session, got)) for k in range(8)]
            for n in range(100):
                await asyncio.to_thread(versions.publish)  # some come twice within a few steps
                if n >= 7 and len(of(got)) > 5 and mixed(got):
                    break
            stop.set()
            await asyncio.gather(*clients)
            for model in ("math@v99999", "math@v", "nobody", "nobody@v0", ""):
                status, answer = await server.post(session, **body(model))
                assert status == 404, answer
        return got

    def of(got: list[Any]) -> set[int]:
        return {v for _, choice in got for v in choice["versions"]}

    def mixed(got: list[Any]) -> list[Any]:
        return [(p, c) for p, c in got if len(set(c["versions"])) > 1]

    got = asyncio.run(run())
    assert len(of(got)) > 5
    assert mixed(got)
    for prompt, choice in [*mixed(got)[:4], *got[:2], *got[-2:]]:
        versions.check(prompt, choice)


def test_sequences_that_were_cut_keep_their_place(server: RunningServer, versions: Versions) -> None:
    """The first ones do not queue up behind requests that came later and were waiting, and are shorter."""

    async def run() -> tuple[list[int], bool]:
        """In which order they ended, and whether all were there at the cut and continued in time."""
        before, ended = versions.stats().requests, list[int]()
        late = (server.folder / "log").read_text().count(LATE)

        async def one(k: int) -> None:
            status, answer = await server.post(session, **body(seed=k, max_tokens=LONG if k < SEQUENCES else LONG // 4))
            assert status == 200, answer
            ended.append(k)

        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            for half in (range(SEQUENCES), range(SEQUENCES, 2 * SEQUENCES)):
                for k in half:
                    group.create_task(one(k))
                await versions.requested(before + half.stop)
            await asyncio.to_thread(versions.publish)
            all_there = not ended
        return ended, all_there and (server.folder / "log").read_text().count(LATE) == late

    ended, _ = seen(lambda: asyncio.run(run()), lambda found: found[1])
    assert set(ended[:SEQUENCES]) == set(range(SEQUENCES))


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_one_answer(server: RunningServer, versions: Versions, n: int) -> None:
    async def run() -> list[dict[str, Any]]:
        events = []
        async with aiohttp.ClientSession() as session:
            async with session.post(server.url("/v1/completions"), json=body(n=n, stream=True)) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        events.append(json.loads(line.removeprefix(b"data: ")))
                    if len(events) in (30, 90):
                        await asyncio.to_thread(versions.publish)
        return events

    def of(events: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
        return [c for e in events for c in e["choices"] if c["index"] == index]

    def cut(events: list[dict[str, Any]]) -> bool:
        return all(
            len({v for part in of(events, index) for v in part.get("versions") or []}) >= 2 for index in range(n)
        )

    events = seen(lambda: asyncio.run(run()), cut)
    for index in range(n):
        parts = of(events, index)
        whole: dict[str, Any] = {
            key: [x for part in parts for x in part.get(key) or []] for key in ("token_ids", "versions")
        }
        whole["logprobs"] = {"token_logprobs": [x for p in parts for x in p["logprobs"]["token_logprobs"]]}
        assert len(whole["token_ids"]) == LONG
        assert [p["finish_reason"] for p in parts if p.get("finish_reason")] == ["length"]
        assert parts[-1]["finish_reason"] == "length"
        assert versions.check(PROMPT, whole) >= 2
        assert "".join(p["text"] for p in parts)


def test_stop_strings_hold_across_a_cut(server: RunningServer, versions: Versions) -> None:
    """64 stop strings of two characters: some answers meet one, and none goes on after it."""
    tokenizer = AutoTokenizer.from_pretrained(server.model)
    letters = "etaoinsh"
    stop = [a + b for a in letters for b in letters]

    async def run() -> list[Any]:
        before = versions.stats().requests
        async with aiohttp.ClientSession() as session:
            asked = [asyncio.create_task(server.post(session, **body(seed=k, stop=stop))) for k in range(16)]
            await versions.requested(before + 16)
            for _ in range(3):
                await asyncio.to_thread(versions.publish)
            return [(await task)[1]["choices"][0] for task in asked]

    def mixed(choices: list[Any]) -> list[Any]:
        return [c for c in choices if len(set(c["versions"])) > 1]

    choices = seen(
        lambda: asyncio.run(run()),
        lambda choices: bool(mixed(choices)) and "stop" in {c["finish_reason"] for c in choices},
    )
    for choice in choices:
        text = tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        assert not any(s in text[:-1] for s in stop)
        assert any(text.endswith(s) for s in stop) == (choice["finish_reason"] == "stop")
        assert not any(s in choice["text"] for s in stop)
    for choice in mixed(choices)[:4]:
        versions.check(PROMPT, choice)


def test_a_stop_string_may_end_with_the_last_token(server: RunningServer, versions: Versions) -> None:
    """The engine has ended the sequence, too, and forgotten it."""
    versions.publish()

    async def run() -> tuple[Any, Any, str]:
        async with aiohttp.ClientSession() as session:
            for seed in range(200):
                _, whole = await server.post(session, **body(seed=seed, max_tokens=8))
                text = whole["choices"][0]["text"]
                if (last := text[-2:]).isascii() and last.isprintable() and last not in text[:-1]:
                    status, answer = await server.post(session, **body(seed=seed, max_tokens=8, stop=[last]))
                    assert status == 200, answer
                    return whole["choices"][0], answer["choices"][0], last
        raise AssertionError("no answer ends with characters that it has once")

    whole, stopped, last = asyncio.run(run())
    assert (whole["finish_reason"], stopped["finish_reason"]) == ("length", "stop")
    assert stopped["token_ids"] == whole["token_ids"]
    assert stopped["text"] == whole["text"].removesuffix(last)


def test_a_client_that_leaves_during_the_switch_ends_its_request(server: RunningServer, versions: Versions) -> None:
    first = versions.publish()

    async def run(delay_s: float) -> int:
        """How many of 16 sequences were aborted."""
        before = versions.stats()
        async with aiohttp.ClientSession() as session:
            asked = [asyncio.create_task(server.post(session, **body(n=4, seed=k))) for k in range(4)]
            await versions.requested(before.requests + 4)
            publish = asyncio.create_task(asyncio.to_thread(versions.publish))
            await asyncio.sleep(delay_s)
            for task in asked:
                task.cancel()
            await publish
        while (after := await asyncio.to_thread(versions.stats)).running or after.waiting:
            await asyncio.sleep(0.005)
        return after.aborted - before.aborted

    for delay_s in (0.0, 0.01, 0.02, 0.04):
        seen(lambda delay_s=delay_s: asyncio.run(run(delay_s)), lambda aborted: aborted == 16)
    last = versions.publish().version
    resident = {AdapterRef.parse(r).version for r in server.admin.info(120.0).refs}
    assert not resident & set(range(first.version, last - 1)), "no request holds the old ones any more"


def test_a_refused_version_cuts_nothing(server: RunningServer, versions: Versions) -> None:
    before = versions.stats().interrupted

    async def run() -> tuple[Any, bool]:
        requests = versions.stats().requests
        async with aiohttp.ClientSession() as session:
            task = asyncio.create_task(server.post(session, **body()))
            await versions.requested(requests + 1)
            broken = {name: t * float("nan") for name, t in server.adapter(1).items()}
            newest = server.newest
            with pytest.raises(ManifestError):
                await asyncio.to_thread(server.publish, broken)
            server.newest = newest
            running = not task.done()
            return (await task)[1]["choices"][0], running

    choice, _ = seen(lambda: asyncio.run(run()), lambda found: found[1])
    assert versions.check(PROMPT, choice) == 1
    assert versions.stats().interrupted == before
