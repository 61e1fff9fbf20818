"""Kept ids that a real server returns: those of a loop in float64 over Hugging Face's probabilities."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from areal_lora.types import MOST_KEPT, TokenColumns
from tests.support.clocks import seen
from tests.support.engine.vllm_ext.serving import PROMPT, VOCAB, RunningServer, Tensors, hf_logits, running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROUNDING = 1e-4
VERSIONS = 12
"""During an answer; the reference of each is read once (``merged_model``)."""
RULES: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 5},
    "top-p": {"top_k": MOST_KEPT, "top_p": 0.9, "temperature": 0.1},
    "min-p": {"top_k": MOST_KEPT, "min_p": 0.2, "temperature": 0.15},
    "all": {"top_k": 40, "top_p": 0.8, "min_p": 0.05, "temperature": 0.2},
    "all, cold": {"top_k": 3, "top_p": 0.95, "min_p": 0.01, "temperature": 0.06},
    "nothing": {"top_k": MOST_KEPT},
    "no end": {"top_k": 5, "min_tokens": 24},
}
END = 1
"""What ends an answer: no id before ``min_tokens``, though it has a part of the whole distribution."""


@pytest.fixture(scope="module")
def server(even_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("kept") / "run"
    with running_server(folder, even_model, in_flight="interrupt", max_staleness=1) as running:
        yield running


class Oracle:
    """Publishes versions, and compares what answers kept."""

    def __init__(self, server: RunningServer) -> None:
        self.server, self.tensors = server, dict[int, Tensors]()
        self.sizes: list[int] = []

    def publish(self) -> None:
        version = self.server.newest.version + 1 if self.server.newest else 0
        self.tensors[version] = self.server.adapter(300 + version)
        self.server.publish(self.tensors[version], version)

    def check(self, prompt: list[int], choice: dict[str, Any], rule: dict[str, Any]) -> int:
        """Ids, masses and log-probabilities of each token's version; returns the number of versions."""
        columns = msgspec.convert(choice["columns"], TokenColumns)
        ids, at = columns.ids.tolist(), 0
        flat = np.frombuffer(columns.kept, "<i4").tolist()
        temperature = rule.get("temperature", 1.0)
        logits = {
            v: hf_logits(self.server.model, self.tensors[v], prompt + ids).double()
            for v in set(columns.each_version.tolist())
        }
        assert len(columns.n_kept) == 2 * len(ids)
        for t, (token, version, n) in enumerate(
            zip(ids, columns.each_version.tolist(), columns.kept_counts.tolist(), strict=True)
        ):
            kept, at = flat[at : at + n], at + n
            logp = (logits[version][len(prompt) + t - 1] / temperature).log_softmax(-1).tolist()
            assert token in kept
            assert len(set(kept)) == n
            self.check_rule(kept, logp, rule)
            mass = math.log(math.fsum(math.exp(logp[i]) for i in kept))
            assert columns.masses[t] == pytest.approx(mass, abs=ROUNDING)
            assert columns.scores[t] == pytest.approx(logp[token] - mass, abs=ROUNDING)
            self.sizes.append(n)
        return len(columns.runs)

    def check_rule(self, kept: list[int], logp: list[float], rule: dict[str, Any]) -> None:
        """They are the likeliest ids, as many as the rule keeps; rounding may decide about the last one."""
        order = sorted((i for i in range(len(logp)) if i != END or not rule.get("min_tokens")), key=lambda i: -logp[i])
        assert min(logp[i] for i in kept) > logp[order[len(kept) - 1]] - ROUNDING
        allowed = set[int]()
        for shift in (-ROUNDING, ROUNDING):
            least = logp[order[0]] + math.log(rule["min_p"]) + shift if rule.get("min_p") else -math.inf
            left = [i for i in order[: rule["top_k"]] if logp[i] >= least]
            total, n = math.fsum(math.exp(logp[i]) for i in left), 1
            while n < len(left) and math.fsum(math.exp(logp[i]) for i in left[:n]) < rule.get("top_p", 1.0) * total * (
                1 - shift
            ):
                n += 1
            allowed.add(n)
        assert min(allowed) <= len(kept) <= max(allowed)


@pytest.fixture
def oracle(server: RunningServer) -> Oracle:
    made = Oracle(server)
    made.publish()
    return made


async def ask(server: RunningServer, prompt: list[int], **more: Any) -> tuple[int, Any]:
    form = {"model": "math", "max_tokens": 24, "ignore_eos": True, "logprobs": 0, "seed": 7}
    form |= {"return_columns": True, "return_kept": True}
    async with aiohttp.ClientSession() as session:
        return await server.post(session, prompt=prompt, **form | more)


async def answers(server: RunningServer, prompt: list[int], **more: Any) -> list[dict[str, Any]]:
    status, answer = await ask(server, prompt, **more)
    assert status == 200, answer
    found: list[dict[str, Any]] = answer["choices"]
    return found


def test_kept_ids_are_those_of_the_rule(server: RunningServer, oracle: Oracle) -> None:
    """Requests of all rules at once, beside one of the whole distribution, in one batch of the engine."""

    async def all_at_once() -> list[Any]:
        whole = answers(server, PROMPT, return_kept=False, top_k=5, temperature=1.3)
        return await asyncio.gather(whole, *(answers(server, PROMPT, n=3, **rule) for rule in RULES.values()))

    (whole,), *found = asyncio.run(all_at_once())
    for (name, rule), choices in zip(RULES.items(), found, strict=True):
        oracle.sizes.clear()
        for choice in choices:
            oracle.check(PROMPT, choice, rule)
        print(f"{name}: {min(oracle.sizes)} to {max(oracle.sizes)} ids, mean {np.mean(oracle.sizes):.1f}")
        assert max(oracle.sizes) <= rule["top_k"]
        assert {*rule} - {"top_k", "min_tokens"} == set() or min(oracle.sizes) < min(max(oracle.sizes), rule["top_k"])
    columns = msgspec.convert(whole["columns"], TokenColumns)
    assert not columns.n_kept
    want = server.logprobs(oracle.tensors[max(oracle.tensors)], PROMPT + columns.ids.tolist(), 1.3)[len(PROMPT) :]
    assert columns.scores.tolist() == pytest.approx(want, abs=ROUNDING)


def test_each_part_of_an_interrupted_answer_has_the_ids_of_its_version(server: RunningServer, oracle: Oracle) -> None:
    rule = {"top_k": 30, "top_p": 0.9}

    async def run() -> list[list[dict[str, Any]]]:
        running = [
            asyncio.create_task(answers(server, [10 + k, 20, 30, 40 + k], n=2, max_tokens=150, seed=k, **rule))
            for k in range(3)
        ]
        for _ in range(VERSIONS):
            if not all(task.done() for task in running):
                await asyncio.to_thread(oracle.publish)
        return [await task for task in running]

    def versions() -> list[int]:
        found = asyncio.run(run())
        return [oracle.check([10 + k, 20, 30, 40 + k], choice, rule) for k, made in enumerate(found) for choice in made]

    seen(versions, lambda found: max(found) > 1)  # an answer was interrupted


def test_likeliest_tokens_are_of_the_whole_distribution_and_none_that_is_left_out(
    server: RunningServer, oracle: Oracle
) -> None:
    (choice,) = asyncio.run(answers(server, PROMPT, logprobs=4, top_k=3, return_token_ids=True))
    columns = msgspec.convert(choice["columns"], TokenColumns)
    rows = [{int(token): value for token, value in row.items()} for row in choice["logprobs"]["top_ids"]]
    assert [set(row) for row in rows] == [
        set(each) for each in np.frombuffer(columns.kept, "<i4").reshape(-1, 3).tolist()
    ]
    sampled = [row[token] for token, row in zip(columns.ids.tolist(), rows, strict=True)]
    assert (columns.scores + columns.masses).tolist() == pytest.approx(sampled, abs=ROUNDING)


@pytest.mark.parametrize(
    "wrong", [{"top_k": 0}, {"top_k": MOST_KEPT + 1}, {"return_columns": False}, {"temperature": 0.0}], ids=str
)
def test_what_has_no_kept_ids_is_refused(server: RunningServer, oracle: Oracle, wrong: dict[str, Any]) -> None:
    status, answer = asyncio.run(ask(server, PROMPT, **{"top_k": 5} | wrong))
    assert status == 400, answer
    assert "return_kept needs" in str(answer)
    assert VOCAB > MOST_KEPT, "as many as the rule allows"
