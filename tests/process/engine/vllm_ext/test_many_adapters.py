"""Three adapters of other weights and targets on one real server, published in turn by a real publisher.

N + 2 slots, policy ``interrupt``. Whose token it is shows in its log-probability, computed again with transformers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM

from areal_lora.config.models import WeightSyncConfig
from areal_lora.config.sizing.slots import slot_parameters
from areal_lora.families.shape import ModelShape
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_secret
from areal_lora.types import AdapterRef, AdapterSpec
from areal_lora.weight_sync.layout import make_layout
from areal_lora.weight_sync.manifest import base_digest
from areal_lora.weight_sync.messages import covered
from areal_lora.weight_sync.trainer.leader import Leader
from areal_lora.weight_sync.trainer.publish_job import PublishJob
from areal_lora.weight_sync.trainer.publisher import Publisher
from tests.support.engine.vllm_ext.serving import (
    ALPHA,
    PROMPT,
    RANK,
    RunningServer,
    Tensors,
    merged_model,
    running_server,
)
from tests.support.solo_exchange import SoloExchange
from tests.support.weight_sync.adapters import pack_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TARGETS = {
    "math": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    "attention": ("linear_qkv", "linear_proj"),
    "experts": ("linear_fc1", "linear_fc2"),
}
NIGHTLY = bool(os.environ.get("AREAL_LORA_NIGHTLY"))
ROUNDS, CYCLES = (40, 1000) if NIGHTLY else (6, 100)


class Tenants:
    """The server, a publisher, and what each version of each adapter holds."""

    def __init__(self, server: RunningServer) -> None:
        self.server, self.made = server, dict[AdapterRef, Tensors]()
        self._digest = base_digest(server.model)
        secret = read_secret(RunFolder(server.folder))
        config = WeightSyncConfig(timeout_s=200.0)
        leader = Leader(run="test", secret=secret, servers=[server.admin.server], config=config)
        self.publisher = Publisher(run="test", config=config, exchange=SoloExchange(), leader=leader, secret=secret)

    def publish(self, name: str, version: int, seed: int | None = None) -> PublishJob:
        ref, targets = AdapterRef(name=name, version=version), TARGETS[name]
        seed = 1000 * list(TARGETS).index(name) + version if seed is None else seed
        whole = self.server.adapter(seed)
        tensors = {n: t for n, t in whole.items() if covered(n.partition(".lora_")[0], targets)}
        spec = AdapterSpec(name=name, base_model="m", rank=RANK, alpha=ALPHA, target_modules=targets)
        layout = make_layout(spec, "float32", {0: [(n, tuple(t.shape)) for n, t in tensors.items()]}, {})
        self.made[ref] = tensors
        return self.publisher.publish(ref, None, layout, pack_of(layout, 0, tensors), self._digest, None)

    def truth(self, ref: AdapterRef) -> Any:
        """Transformers' model with a version merged into it."""
        return merged_model(self.server.model, save(self.made[ref]), ALPHA / RANK)


@pytest.fixture(scope="module")
def tenants(even_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    folder = tmp_path_factory.mktemp("tenants") / "run"
    how: dict[str, Any] = {"in_flight": "interrupt", "max_staleness": 0, "max_adapters": 3}
    with running_server(folder, even_model, **how) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightSyncConfig, "ping_s", 30.0)  # a server that stands still is not dead
        made = Tenants(server)
        yield made
        made.publisher.close()


def test_a_slot_takes_the_memory_that_the_plan_says(tenants: Tenants) -> None:
    """One prediction for slots of mixed targets, within 10 % (of the even model: one expert more or less shows)."""
    reply, config = tenants.server.modules(), tenants.server.config
    shape = ModelShape.from_hf(AutoModelForCausalLM.from_pretrained(tenants.server.model).config.to_dict())
    assert reply.slots == len(TARGETS) + 2
    assert slot_parameters(config, shape) * 4 == pytest.approx(reply.slot_bytes, rel=0.1)


def test_no_token_is_sampled_by_a_foreign_adapter_while_versions_of_all_come_in_turn(tenants: Tenants) -> None:
    server, answers = tenants.server, list[tuple[str, list[int], Any]]()
    for name in TARGETS:
        tenants.publish(name, 0).wait()

    def mixed(answers: list[tuple[str, list[int], Any]]) -> bool:
        return any(len(set(choice["versions"])) > 1 for _, _, choice in answers)

    async def client(name: str, k: int, stop: asyncio.Event, session: aiohttp.ClientSession) -> None:
        while not stop.is_set():
            prompt = [10 + k, 20, 30 + len(answers) % 50]
            status, answer = await server.post(
                session,
                model=name,
                prompt=prompt,
                max_tokens=60,
                ignore_eos=True,
                logprobs=0,
                return_token_ids=True,
                seed=len(answers),
            )
            assert status == 200, answer
            answers.append((name, prompt, answer["choices"][0]))

    async def run() -> None:
        stop = asyncio.Event()
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            for k in range(4):
                for name in TARGETS:
                    group.create_task(client(name, k, stop, session))
            for version in range(1, 20 * ROUNDS + 1):
                if version > ROUNDS and mixed(answers) and {name for name, _, _ in answers} == set(TARGETS):
                    break
                handles = [tenants.publish(name, version) for name in TARGETS]
                reports = await asyncio.to_thread(lambda handles=handles: [h.wait() for h in handles])
                assert [(r.attempts, r.lost) for r in reports] == [(1, {})] * 3
                await asyncio.sleep(0.2)
            stop.set()

    asyncio.run(run())
    assert {name for name, _, _ in answers} == set(TARGETS)
    assert mixed(answers)
    foreign = check_tokens(tenants, answers)
    assert foreign > 0.1, "the adapters cannot be told apart"


def check_tokens(tenants: Tenants, answers: list[tuple[str, list[int], Any]]) -> float:
    """Check every token under the version that it claims; return the mean difference under other adapters."""
    off, tokens, apart = 0.0, 0, list[float]()
    for ref in sorted({AdapterRef(name=name, version=v) for name, _, choice in answers for v in choice["versions"]}):
        rows = [row for row in answers if row[0] == ref.name and ref.version in row[2]["versions"]]
        foreign = [row for row in answers if row[0] != ref.name][:2]
        with torch.no_grad():  # all are of one length
            logits = tenants.truth(ref)(torch.tensor([p + c["token_ids"] for _, p, c in rows + foreign])).logits
        for (name, prompt, choice), own in zip(rows + foreign, logits, strict=True):
            ids, versions = torch.tensor(choice["token_ids"]), torch.tensor(choice["versions"])
            want = own[len(prompt) - 1 : -1].log_softmax(-1).gather(1, ids[:, None])[:, 0]
            difference = (torch.tensor(choice["logprobs"]["token_logprobs"]) - want).abs()
            if name == ref.name:
                mine = difference[versions == ref.version]
                off, tokens = max(off, mine.max().item()), tokens + len(mine)
            else:
                apart.append(difference.mean().item())
    assert off < 1e-4, "a token is not of the adapter and version that it claims"
    assert tokens == sum(len(choice["token_ids"]) for _, _, choice in answers)
    print(
        f"{tokens} tokens, largest difference {off:.1e}, under other adapters {sum(apart) / len(apart):.2f} on average"
    )
    return sum(apart) / len(apart)


def test_a_name_that_begins_anew_never_answers_with_its_former_weights(tenants: Tenants) -> None:
    """The prefix cache knows the prompt under the same name and version."""
    server = tenants.server
    tenants.publisher.drop("experts")

    async def run() -> list[list[float]]:
        found = []
        async with aiohttp.ClientSession() as session:
            while (await server.post(session, model="experts", prompt=PROMPT, max_tokens=1))[0] != 404:
                await asyncio.sleep(0.05)
            for life in range(3):
                await asyncio.to_thread(tenants.publish("experts", 0, seed=7000 + life).wait)
                for _ in range(2):  # the second one from the cache
                    ids, logprobs = await server.greedy(session, "experts@v0", PROMPT, 8)
                model = tenants.truth(AdapterRef(name="experts", version=0))
                with torch.no_grad():
                    scores = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
                assert scores.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist() == pytest.approx(logprobs, abs=1e-4)
                found.append(logprobs)
                tenants.publisher.drop("experts")
        return found

    first, second, third = asyncio.run(run())
    assert first != second != third


def test_adapters_that_come_and_go_leave_nothing_at_a_server(tenants: Tenants) -> None:
    pid = tenants.server.process.pid

    def counts() -> tuple[int, int]:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]), len(os.listdir(f"/proc/{pid}/fd"))

    def cycle(k: int) -> None:
        tenants.publish("attention", 0, seed=9000 + k).wait()
        tenants.publisher.drop("attention")

    tenants.publisher.drop("attention")
    for k in range(5):
        cycle(k)
    pages, fds = counts()
    for k in range(CYCLES):
        cycle(k)
    after, fds_after = counts()
    assert fds_after - fds < 8, "a drop that overlaps the next publish opens one connection, once"
    assert after - pages < 4096, "more than 16 MiB"
    tenants.publish("attention", 0).wait()
    assert {ref.partition("@")[0] for ref in tenants.server.admin.info(120.0).refs} == {"math", "attention"}
