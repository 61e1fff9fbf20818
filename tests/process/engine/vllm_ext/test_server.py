"""A real server, a real trainer-side publisher, Hugging Face as the oracle."""

from __future__ import annotations

import asyncio
import http.client
import math
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
import torch

from areal_lora.network.tls import Plane, client_context
from areal_lora.obs.machine import MachineUse
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_secret
from areal_lora.run_folder.status import last_beats
from areal_lora.types import TokenColumns
from areal_lora.weight_sync import messages as transport
from areal_lora.weight_sync.admin_client import AdminClient
from areal_lora.weight_sync.messages import ServerStats
from tests.support.clocks import seen, wait_until
from tests.support.engine.vllm_ext.serving import (
    PROMPT,
    RunningServer,
    adapter,
    answers_a_ping,
    hf_logits,
    merged_model,
    running_server,
)
from tests.support.lazy import Lazy
from tests.support.paths import TINY_MODEL

extension = Lazy("areal_lora.engine.vllm_ext.worker.extension")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def largest(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b)
    return max(abs(x - y) for x, y in zip(a, b))


def test_published_versions_score_like_merged_hugging_face(server: RunningServer) -> None:
    tensors = server.adapter(1)
    before = server.score(None)
    assert largest(before, server.logprobs(None, PROMPT)) < 1e-4

    zero = server.publish(server.adapter(1, b_scale=0.0))
    assert server.score(zero) == pytest.approx(before, abs=1e-6)
    ref = server.publish(tensors)
    want = server.logprobs(tensors, PROMPT)
    got = server.score(ref)
    assert largest(got, want) < 1e-4
    assert largest(got, before) > 0.1, "the adapter must show"
    assert server.score(None) == pytest.approx(before, abs=1e-6)


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.experts.0.down_proj.lora_B.weight", "model.layers.1.self_attn.k_proj.lora_B.weight"]
)
def test_one_flipped_tensor_shows(server: RunningServer, name: str) -> None:
    """The parity test above can fail: a single matrix with the wrong sign is far outside its tolerance."""
    tensors = server.adapter(1)
    wrong = tensors | {name: -tensors[name]}
    assert largest(server.score(server.publish(wrong)), server.logprobs(tensors, PROMPT)) > 1e-3


@pytest.mark.parametrize(
    ("temperature", "truncation"),
    [
        (1.0, {}),
        (0.7, {}),
        (0.7, {"top_p": 0.5}),
        (1.3, {"top_p": 0.9}),
        (1.3, {"top_k": 3}),
        (0.7, {"top_p": 0.6, "top_k": 5}),
    ],
)
def test_sampled_logprobs_are_those_of_the_policy_at_its_temperature(
    server: RunningServer, temperature: float, truncation: dict[str, Any]
) -> None:
    """log softmax(logits / temperature), as the trainer computes it, whatever was cut off before sampling."""
    tensors = server.adapter(2)
    ref = server.publish(tensors)

    async def sample(**form: bool) -> Any:
        async with aiohttp.ClientSession() as session:
            return await server.post(
                session,
                model="math",
                prompt=PROMPT,
                n=3,
                max_tokens=12,
                temperature=temperature,
                logprobs=0,
                seed=5,
                return_token_ids=True,
                **truncation | form,
            )

    status, answer = asyncio.run(sample())
    assert status == 200, answer
    assert answer["model"] == str(ref), "a bare name is the newest version"
    assert len(answer["choices"]) == 3
    assert len({tuple(c["token_ids"]) for c in answer["choices"]}) > 1
    for choice in answer["choices"]:
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        assert choice["versions"] == [ref.version] * len(ids)
        assert choice["finish_reason"] in ("stop", "length")
        want = server.logprobs(tensors, PROMPT + ids, temperature)
        assert largest(logprobs, want[len(PROMPT) :]) < 1e-4
        assert largest(server.score(ref, PROMPT + ids, temperature)[len(PROMPT) :], logprobs) < 1e-4
    _, in_columns = asyncio.run(sample(return_columns=True))
    for choice, other in zip(answer["choices"], in_columns["choices"], strict=True):
        columns = msgspec.convert(other["columns"], TokenColumns)
        assert columns.ids.tolist() == choice["token_ids"]
        assert largest(columns.scores.tolist(), choice["logprobs"]["token_logprobs"]) < 1e-4
        assert columns.each_version.tolist() == choice["versions"]
        assert {"token_ids", "versions", "prompt_routes"}.isdisjoint(other)
        assert "routes" not in other["columns"], "router_replay is off"


def test_prompts_are_scored_at_the_temperature_that_each_request_names(server: RunningServer) -> None:
    tensors = server.adapter(2)
    ref = server.publish(tensors)
    temperatures = (1.0, 0.5, 2.0, 1.0)
    with ThreadPoolExecutor(4) as pool:  # together, so that the engine has them in one batch
        clients = [AdminClient(server.admin.server, read_secret(RunFolder(server.folder))) for _ in temperatures]
        got = list(pool.map(lambda c, t: c.score(str(ref), [PROMPT], 120.0, t)[0], clients, temperatures))
    for temperature, scores in zip(temperatures, got, strict=True):
        assert largest(scores, server.logprobs(tensors, PROMPT, temperature)) < 1e-4
    assert largest(got[0], got[1]) > 0.1


@pytest.mark.parametrize(
    "setting",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"logit_bias": {"5": 2.0}},
        {"bad_words": ["a"]},
        {"guided_regex": "a+"},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_would_change_the_distribution_is_refused(
    server: RunningServer, path: str, setting: dict[str, Any]
) -> None:
    async def ask() -> Any:
        prompt = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
        async with aiohttp.ClientSession() as session:
            return await server.post(session, path, model="base", max_tokens=2, **prompt, **setting)

    status, answer = asyncio.run(ask())
    assert status == 400, answer
    assert next(iter(setting)) in str(answer)


def test_min_p_and_min_tokens_are_kept(server: RunningServer) -> None:
    async def ask(**setting: Any) -> list[int]:
        async with aiohttp.ClientSession() as session:
            body = {"model": "base", "prompt": PROMPT, "return_token_ids": True, **setting}
            status, answer = await server.post(session, "/v1/completions", **body)
        assert status == 200, answer
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    greedy = asyncio.run(ask(max_tokens=6, temperature=0.0))
    assert asyncio.run(ask(max_tokens=6, temperature=1.0, min_p=0.9999, seed=1)) == greedy
    free = [asyncio.run(ask(max_tokens=6, temperature=2.0, seed=seed)) for seed in range(8)]
    assert any(ids != greedy for ids in free), "without min_p a high temperature leaves the likeliest tokens"
    assert len(asyncio.run(ask(max_tokens=20, min_tokens=20, temperature=0.0))) == 20


def test_mixed_batch_equals_each_alone_and_base_is_untouched(server: RunningServer) -> None:
    first, second = server.publish(server.adapter(3)), server.publish(server.adapter(4))
    jobs = [(m, [10 + i, 20, 30, 40 + i]) for i in range(3) for m in ("base", str(first), str(second))]

    async def both() -> tuple[list[Any], list[Any]]:
        async with aiohttp.ClientSession() as session:
            alone = [await server.greedy(session, m, p) for m, p in jobs]
            return alone, await asyncio.gather(*(server.greedy(session, m, p) for m, p in jobs))

    alone, mixed = asyncio.run(both())
    for (model, _), (ids, lp), (mixed_ids, mixed_lp) in zip(jobs, alone, mixed):
        assert mixed_ids == ids
        assert largest(mixed_lp, lp) < (1e-6 if model == "base" else 1e-5)
    assert alone[1][0] != alone[2][0], "the two versions must differ"


def test_publish_during_generation_leaves_running_requests_alone(server: RunningServer) -> None:
    prompts = [[10 + k, 20, 30, 40 + k] for k in range(3)]

    async def run() -> tuple[list[Any], list[Any], int]:
        async with aiohttp.ClientSession() as session:
            old = await asyncio.to_thread(server.publish, server.adapter(5))
            reference = [await server.greedy(session, str(old), p, 150) for p in prompts]
            running = [asyncio.create_task(server.greedy(session, str(old), p, 150)) for p in prompts]
            await asyncio.sleep(0.02)
            new = await asyncio.to_thread(server.publish, server.adapter(6))
            in_flight = sum(not t.done() for t in running)
            await server.greedy(session, str(new), prompts[0], 20)
            return reference, await asyncio.gather(*running), in_flight

    # The publish must overlap generation.
    reference, during, _ = seen(lambda: asyncio.run(run()), lambda found: found[2] > 0)
    assert [ids for ids, _ in during] == [ids for ids, _ in reference]
    assert max(largest(a[1], b[1]) for a, b in zip(during, reference)) < 1e-5


def test_a_probe_does_not_queue_behind_the_rollouts(server: RunningServer) -> None:
    at_once = server.config.rollout.max_num_seqs
    ref = server.publish(server.adapter(3))
    prompts = [[10 + k % 80, 20 + k // 80, 30] for k in range(3 * at_once)]

    async def run() -> tuple[int, list[Any]]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            before = server.admin.info(120.0).stats.requests
            running = [asyncio.create_task(server.greedy(session, str(ref), p, 40)) for p in prompts]
            while (await asyncio.to_thread(server.admin.info, 120.0)).stats.requests < before + len(prompts):
                if all(task.done() for task in running):
                    break
            await asyncio.to_thread(server.admin.score, str(ref), [PROMPT], 120.0)
            return sum(task.done() for task in running), await asyncio.gather(*running)

    # It took the first free place, not the one after all that waited.
    _, answers = seen(lambda: asyncio.run(run()), lambda found: found[0] < 2 * at_once)
    assert len(answers) == 3 * at_once


def use_of(server: RunningServer) -> MachineUse:
    return msgspec.json.decode((RunFolder(server.folder).statuses / "server-0.json").read_bytes(), type=MachineUse)


def test_the_use_of_machine_and_kv_cache_is_known(server: RunningServer) -> None:
    def share() -> float:
        return server.admin.info(120.0).stats.kv_cache_share

    async def run() -> None:
        async def sample(first: int) -> None:
            while True:
                await server.greedy(session, "base", [first, *PROMPT], 150)

        async with aiohttp.ClientSession() as session:
            running = [asyncio.create_task(sample(10 + k)) for k in range(4)]
            while not 0 < await asyncio.to_thread(share) <= 1:
                await asyncio.sleep(0.05)
            for task in running:
                task.cancel()

    asyncio.run(asyncio.wait_for(run(), 120))
    wait_until(lambda: share() == 0)
    use = use_of(server)
    engine = max(p.memory_info().rss for p in psutil.Process(server.process.pid).children())
    assert use.figures["memory_gib"] * 2**30 > engine, "of the server and its descendants"
    assert use.figures.keys() >= {"cpu_share", "sequences_running", "kv_cache_share"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A small cache, and a tokenizer as of base models: its end of sequence is not the end of a turn."""
    folder = tmp_path_factory.mktemp("small")
    model = Path(shutil.copytree(TINY_MODEL, folder / "model"))
    for name, old, new in (
        ("tokenizer_config.json", '"eos_token": "<eos>"', '"eos_token": "<pad>"'),
        ("generation_config.json", '"eos_token_id": 1', '"eos_token_id": 0'),
        ("config.json", '"eos_token_id": 1', '"eos_token_id": 0'),
        ("chat_template.jinja", "eos_token", "'<eos>'"),
    ):
        text = (model / name).read_text()
        assert old in text, name
        (model / name).write_text(text.replace(old, new))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # of `stock_scores`, which this process may have
        with running_server(folder / "run", model, kv_cache_gib=0.002) as server:
            yield server


def test_a_chats_answer_ends_with_its_turn_also_where_the_end_of_sequence_is_another_token(
    small: RunningServer,
) -> None:
    async def run() -> list[tuple[str, int]]:
        async with aiohttp.ClientSession() as session:
            found = []
            for more in ({}, {"ignore_eos": True}):
                chat = {"messages": [{"role": "user", "content": "1+2=?"}], "max_tokens": 60, "temperature": 0.0} | more
                status, answer = await small.post(session, "/v1/chat/completions", model="base", **chat)
                assert status == 200, answer
                found.append((answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]))
            return found

    (ended, n), endless = asyncio.run(run())
    assert ended == "stop"
    assert n < 60
    assert endless == ("length", 60)


@pytest.mark.timeout(900)
def test_sequences_that_the_kv_cache_has_no_place_for_wait(small: RunningServer) -> None:
    """40 answers, also of one request, are less than may run at a time; they need more than the cache has."""
    server = small

    async def run() -> tuple[ServerStats, float]:
        async def sample(n: int) -> None:
            while True:
                await server.post(session, model="base", prompt=[5, 6, 7, 8], n=n, max_tokens=200, ignore_eos=True)

        found, cached, stats = None, 0.0, None  # of any round: a prompt is cached while another sequence has it
        async with aiohttp.ClientSession() as session:
            running = [asyncio.create_task(sample(n)) for n in (*[1] * 20, 20)]
            for _ in range(900):
                stats = (await asyncio.to_thread(server.admin.info, 120.0)).stats
                cached = max(cached, use_of(server).figures.get("prefix_cache_share", 0.0))
                if stats.running and stats.waiting and stats.preemptions and stats.kv_cache_share > 0.5:
                    found = stats
                if found is not None and cached:
                    break
                ended = [task.exception() for task in running if task.done()]
                assert not ended, ended
                await asyncio.sleep(0.1)
            for task in running:
                task.cancel()
            assert found is not None, (stats, cached)
            return found, cached

    found, cached = asyncio.run(run())
    assert 0 < found.running < 40 < server.config.rollout.max_num_seqs
    assert found.running + found.waiting <= 40
    assert found.kv_cache_share <= 1
    assert 0 < cached <= 1


def test_only_the_threads_that_receive_have_a_low_priority(server: RunningServer) -> None:
    if os.getpriority(os.PRIO_PROCESS, 0) >= extension.NICE:
        pytest.skip("all threads have a priority as low as that")
    server.publish(server.adapter(1))
    engine = max(psutil.Process(server.process.pid).children(), key=lambda p: p.memory_info().rss)
    nice = {}
    for task in Path(f"/proc/{engine.pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            nice[int(task.name)] = int((task / "stat").read_text().rpartition(")")[2].split()[16])
    own = nice[engine.pid]
    assert own < extension.NICE, "the model's own thread"
    low = [n for n in nice.values() if n == extension.NICE]
    assert 2 <= len(low) < len(nice) / 2
    assert set(nice.values()) == {own, extension.NICE}


def test_every_answer_is_of_one_version_while_versions_come_and_go(server: RunningServer) -> None:
    """Requests for the newest version, more publishes than slots: no 404, no base output, no mixture."""
    seeds = {server.publish(server.adapter(20)).version: 20}
    answers: list[tuple[list[int], dict[str, Any]]] = []
    resident = server.config.rollout.resident_versions

    async def client(k: int, stop: asyncio.Event) -> None:
        async with aiohttp.ClientSession() as session:
            i = 0
            while not stop.is_set():
                prompt = [10 + k, 20, 30 + i % 50]
                status, answer = await server.post(
                    session,
                    model="math",
                    prompt=prompt,
                    max_tokens=20 + 8 * k,
                    temperature=1.0,
                    logprobs=0,
                    seed=i,
                    return_token_ids=True,
                    ignore_eos=True,
                )
                assert status == 200, answer
                answers.append((prompt, answer))
                i += 1

    async def run() -> None:
        stop = asyncio.Event()
        clients = [asyncio.create_task(client(k, stop)) for k in range(8)]
        for seed in range(21, 121):
            ref = await asyncio.to_thread(server.publish, server.adapter(seed))
            seeds[ref.version] = seed
            await asyncio.sleep(0.1)
            if len(seeds) > 3 * resident and len({answer["model"] for _, answer in answers}) > resident:
                break
        stop.set()
        await asyncio.gather(*clients)

    asyncio.run(run())
    seen = {answer["model"] for _, answer in answers}
    assert len(seen) > resident, "versions must change under the requests"
    checked = {}
    for prompt, answer in answers:
        choice = answer["choices"][0]
        version = int(answer["model"].removeprefix("math@v"))
        assert set(choice["versions"]) == {version}
        checked.setdefault(version, []).append((prompt, choice))
    for version, rows in checked.items():
        tensors = server.adapter(seeds[version])
        for prompt, choice in (rows[0], rows[-1]):
            ids = choice["token_ids"]
            want = server.logprobs(tensors, prompt + ids)[len(prompt) :]
            assert largest(choice["logprobs"]["token_logprobs"], want) < 1e-4, f"not version {version} all through"


def test_old_versions_retire_but_not_under_a_request(server: RunningServer) -> None:
    held = server.publish(server.adapter(10))

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            body = {"model": str(held), "prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}
            async with session.post(server.url("/v1/completions"), json=body) as response:
                await response.content.readline()
                for seed in range(6):
                    await asyncio.to_thread(server.publish, server.adapter(seed))
                    found = await asyncio.to_thread(server.admin.info, 120.0)
                    if found.stats.idle_s == (await asyncio.to_thread(server.admin.info, 120.0)).stats.idle_s:
                        assert str(held) in found.refs
                async for _ in response.content:
                    pass
            for seed in range(2):
                await asyncio.to_thread(server.publish, server.adapter(seed))
            status, answer = await server.post(session, model=str(held), prompt=PROMPT)
            assert status == 404, answer

    asyncio.run(run())
    refs = server.admin.info(120.0).refs
    assert len(refs) <= server.config.rollout.resident_versions
    assert str(server.newest) in refs


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["nobody", "math@v9999", "math@v", "nobody@v0", "", "/etc", "tiny"])
def test_unknown_models_are_404_never_the_base(server: RunningServer, model: str, stream: bool) -> None:
    server.publish(server.adapter(1))

    async def ask() -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session:
            return await server.post(session, model=model, prompt=PROMPT, stream=stream)

    status, answer = asyncio.run(ask())
    assert status == 404
    assert "choices" not in answer
    assert "math@v" in answer["error"]["message"], "the message must say what is served"


BAD_REQUESTS = {
    "empty": {"prompt": []},
    "empty text": {"prompt": ""},
    "too long": {"prompt": [5] * 250, "max_tokens": 16},
    "outside": {"prompt": [288]},
    "negative": {"prompt": [-1]},
    "mixed": {"prompt": ["a", 5]},
    "unknown field": {"prompt": "a", "best_of": 4},
    "no prompt": {},
    "temperature": {"prompt": "a", "temperature": -1.0},
    "n": {"prompt": "a", "n": 0},
    "columns": {"prompt": "a", "return_columns": True},
    "stream two": {"prompt": ["a", "b"], "stream": True},
    "stream refused by the engine": {"prompt": "a", "stream": True, "structured_outputs": {"json": {"type": 5}}},
    "likeliest tokens": {"prompt": "a", "logprobs": 21},
    "negative likeliest tokens": {"prompt": "a", "logprobs": -1},
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_requests_are_400(server: RunningServer, case: str) -> None:
    async def ask() -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session:
            return await server.post(session, model="base", **BAD_REQUESTS[case])

    status, answer = asyncio.run(ask())
    assert status == 400, answer
    assert answer["error"]["message"]


def test_forms_of_prompts_and_answers(server: RunningServer) -> None:
    server.publish(server.adapter(1))

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            ids = [2 + b for b in (3, 4, 5, 6)]
            status, many = await server.post(
                session, model="math", prompt=[ids, PROMPT], n=2, max_tokens=5, return_token_ids=True, top_k=1
            )
            assert status == 200, many
            assert [c["index"] for c in many["choices"]] == [0, 1, 2, 3]
            assert many["choices"][0]["token_ids"] == many["choices"][1]["token_ids"]
            assert many["usage"]["prompt_tokens"] == len(ids) + len(PROMPT)
            # Its answer ends with a whole character: of a part a stream sends nothing.
            _, text = await server.post(session, model="math", prompt="5+5=", max_tokens=5, temperature=0.0)
            whole = many["choices"][0]["token_ids"]
            _, stopped = await server.post(
                session,
                model="math",
                prompt=ids,
                max_tokens=5,
                return_token_ids=True,
                top_k=1,
                stop_token_ids=[whole[1]],
            )
            first = whole.index(whole[1])
            assert stopped["choices"][0]["token_ids"] == whole[: first + 1]
            assert stopped["choices"][0]["finish_reason"] == "stop"
            _, echo = await server.post(
                session, model="math", prompt="5+5=", max_tokens=5, temperature=0.0, echo=True, logprobs=0
            )
            assert echo["choices"][0]["text"] == "5+5=" + text["choices"][0]["text"]
            assert len(echo["choices"][0]["logprobs"]["token_logprobs"]) == 9
            _, both = await server.post(
                session,
                model="math",
                prompt=ids,
                max_tokens=2,
                temperature=0.5,
                seed=1,
                echo=True,
                logprobs=3,
                return_token_ids=True,
            )
            (choice,) = both["choices"]
            scores, rows = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_ids"]
            assert len(rows) == len(scores) == len(choice["token_ids"]) == len(ids) + 2
            assert (scores[0], rows[0]) == (0.0, {})
            for token, score, row in list(zip(choice["token_ids"], scores, rows, strict=True))[1:]:
                assert row[str(token)] == score, "the prompt's own tokens and those sampled"
                assert len(row) in (3, 4)
                assert sum(math.exp(value) for value in row.values()) <= 1.0 + 1e-5
            status, _ = await server.post(session, model="math", prompt=ids, max_tokens=1, echo=True, logprobs=21)
            assert status == 400
            _, top = await server.post(session, model="math", prompt="5+5=", max_tokens=2, temperature=0.0, logprobs=3)
            assert len(top["choices"][0]["logprobs"]["top_logprobs"]) == 2
            _, chat = await server.post(
                session,
                "/v1/chat/completions",
                model="math",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=5,
                logprobs=True,
                temperature=0.0,
            )
            assert chat["choices"][0]["message"]["role"] == "assistant"
            assert len(chat["choices"][0]["logprobs"]["content"]) == 5
            async with session.post(
                server.url("/v1/completions"),
                json={"model": "math", "prompt": "5+5=", "max_tokens": 5, "temperature": 0.0, "stream": True},
            ) as response:
                lines = [line async for line in response.content if line.strip()]
            assert lines[-1].strip() == b"data: [DONE]"
            # vLLM joins the pieces that a busy reader has not taken yet: only the whole is certain.
            pieces = [msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines[:-1]]
            assert "".join(piece["choices"][0]["text"] for piece in pieces) == text["choices"][0]["text"]
            assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
            assert [v for piece in pieces for v in piece["choices"][0]["versions"]] == text["choices"][0]["versions"]
            async with session.get(server.url("/v1/models")) as response:
                names = [m["id"] for m in (await response.json())["data"]]
            assert names == ["base", *server.admin.info(120.0).refs]
            async with session.get(server.url("/health")) as response:
                assert response.status == 200

    asyncio.run(run())


def test_a_client_that_leaves_ends_its_request(server: RunningServer) -> None:
    async def run() -> int:
        async def counter(name: str) -> int:
            async with session.get(server.url("/metrics")) as response:
                rows = dict(line.split() for line in (await response.text()).splitlines() if line[0] != "#")
            return int(rows[f"areal_lora_{name}"])

        async with aiohttp.ClientSession() as session:
            aborted, asked = await counter("sequences_aborted_total"), await counter("requests_total")
            left = asyncio.create_task(
                server.post(session, model="base", prompt=PROMPT, n=4, max_tokens=200, ignore_eos=True)
            )
            while await counter("requests_total") == asked and not left.done():
                pass
            left.cancel()
            idle_s = server.admin.info(120.0).stats.idle_s
            while server.admin.info(120.0).stats.idle_s == idle_s:
                await asyncio.sleep(0.02)
            return await counter("sequences_aborted_total") - aborted

    seen(lambda: asyncio.run(run()), lambda aborted: aborted == 4)


ADMIN_PATHS = [
    ("GET", transport.INFO_PATH),
    ("GET", transport.MODULES_PATH),
    ("GET", transport.PING_PATH),
    ("POST", transport.JOIN_PATH),
    ("POST", transport.PUBLISH_PATH),
    ("POST", transport.SCORE_PATH),
    ("POST", transport.RELAY_PATH),
    ("GET", "/openapi.json"),
]


@pytest.mark.parametrize(("method", "path"), ADMIN_PATHS)
@pytest.mark.parametrize("header", [None, "Bearer " + "0" * 64, "Bearer", ""])
def test_admin_without_its_key_is_401(server: RunningServer, method: str, path: str, header: str | None) -> None:
    tls = client_context(read_secret(RunFolder(server.folder)), Plane.ADMIN)
    connection = http.client.HTTPSConnection("127.0.0.1", server.endpoint.ports["admin"], timeout=120, context=tls)
    connection.request(method, path, b"", {} if header is None else {"Authorization": header})
    assert connection.getresponse().status == 401
    connection.close()
    assert server.process.poll() is None


def test_ports_listen_on_loopback_only(server: RunningServer) -> None:
    family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    listening = {c.laddr.ip for p in family for c in p.net_connections() if c.status == psutil.CONN_LISTEN}
    assert listening <= {"127.0.0.1", "::1"}, listening


def test_the_engine_holds_none_of_the_servers_ports(server: RunningServer) -> None:
    """A fork inherits listening sockets; a server that is restarted on its port would find the port in use."""
    process = psutil.Process(server.process.pid)
    ports = set(server.endpoint.ports.values())
    assert ports <= _listening(process)
    children = process.children(recursive=True)
    assert children, "the engine is a child process"
    assert not any(ports & _listening(child) for child in children)


def _listening(process: psutil.Process) -> set[int]:
    return {c.laddr.port for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}


def test_a_stopped_engine_stops_the_heartbeat_of_a_server_that_still_answers(server: RunningServer) -> None:
    """Its API process lives on, so only what it asks its workers can tell."""

    def beats() -> float:
        return last_beats(RunFolder(server.folder))["server-0"]

    def silent() -> bool:
        """For three beats."""
        before = beats()
        time.sleep(3.0)
        return beats() == before

    def renewed(before: float) -> bool:
        return beats() != before

    engine = psutil.Process(server.process.pid).children(recursive=True)
    assert engine
    wait_until(partial(renewed, beats()))
    for process in engine:
        process.suspend()
    try:
        wait_until(silent, what="the end of the heartbeat")
        assert server.admin.info(120.0).run == "test"
    finally:
        for process in engine:
            process.resume()
    wait_until(partial(renewed, beats()))
    wait_until(partial(answers_a_ping, server))


def test_an_address_of_another_machine_is_an_early_error(
    server: RunningServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = server.config.model_copy(
        update={"cluster": server.config.cluster.model_copy(update={"bind": "192.0.2.1"})}
    )
    (tmp_path / "config.json").write_text(elsewhere.model_dump_json(), encoding="utf-8")
    from areal_lora.engine.vllm_ext.server.main import main

    assert main(["--run-folder", str(tmp_path), "--index", "0"]) == 64
    assert "cluster.bind" in capfd.readouterr().err


def test_logits_oracle_is_deterministic(tiny_model: Path) -> None:
    tensors = adapter(tiny_model, 1)
    first = hf_logits(tiny_model, tensors, PROMPT)
    merged_model.cache_clear()
    assert torch.equal(first, hf_logits(tiny_model, tensors, PROMPT))
