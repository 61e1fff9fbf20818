"""What a turn of an agent's conversation costs the controller: ``python benchmarks/agent_turns.py [TURNS] [TOKENS]``.

CPU seconds and kept megabytes of the first and of the last tenth of the turns: from the body of a chat completion to
that of its answer, with a stand-in for the engine. The conversation ends with TOKENS tokens.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from areal_lora.config.models import SamplingConfig
from areal_lora.data.prompts import Formatter, load_tokenizer
from areal_lora.rollout.agent_api.chat import parse_chat, reply_body
from areal_lora.rollout.agent_api.session import Session
from areal_lora.rollout.completion_client import CompletionRequest, encoded
from areal_lora.rollout.workflow import WorkflowContext
from areal_lora.types import AdapterRef, Generation, TokenColumns

MODEL = Path(__file__).resolve().parents[1] / "examples" / "math" / "tiny_model"


@dataclass
class StandIn:
    """A client whose server answers at once, with ``token_ids``; it writes the request as for a real one."""

    token_ids: list[int]
    text: str
    pins: bool = False

    def newest(self, ref: AdapterRef) -> AdapterRef:
        return ref

    async def sample(self, ref: AdapterRef, request: CompletionRequest, **_: Any) -> list[Generation]:
        encoded(request)
        n = len(self.token_ids)
        return [
            Generation(
                columns=TokenColumns.of(self.token_ids, [-0.5] * n, [1] * n), finish_reason="stop", text=self.text
            )
        ]


async def played(turns: int, tokens: int) -> list[tuple[float, int]]:
    """CPU seconds of each turn, and bytes that Python has kept after it (0 unless they are traced)."""
    tokenizer, said = load_tokenizer(str(MODEL)), "a" * (tokens // turns // 2 - 4)
    client: Any = StandIn([*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id], said)
    sampling = SamplingConfig(prompts_per_step=1, n_samples=1, max_new_tokens=tokens)
    formatter = Formatter(tokenizer=tokenizer)
    context = WorkflowContext(
        client=client, scorer=client, sampling=sampling, formatter=formatter, max_model_len=2 * tokens
    )
    session = Session(context=context, ref=AdapterRef(name="math", version=1), seed=7)
    messages: list[dict[str, str]] = []
    costs = []
    for _ in range(turns):
        messages.append({"role": "user", "content": said})
        body = msgspec.json.encode({"model": "math", "messages": messages})
        start = time.process_time()
        answered = await session.answer(parse_chat(msgspec.json.decode(body)))
        msgspec.json.encode(reply_body(answered, "math", {}, session.spell))
        seconds = time.process_time() - start
        messages.append({"role": "assistant", "content": answered.replies[0].turn.content})
        del answered, body
        gc.collect()
        costs.append((seconds, tracemalloc.get_traced_memory()[0]))
    assert len(session.conversations) == 1, "every turn continues the conversation"
    print(f"{turns} turns, {len(session.conversations[0])} tokens")
    return costs


def main(turns: int = 100, tokens: int = 32_768) -> None:
    seconds = [cost[0] for cost in asyncio.run(played(turns, tokens))]
    tracemalloc.start()
    kept = [cost[1] for cost in asyncio.run(played(turns, tokens))]
    tenth = turns // 10
    for name, a, b in (("first", 0, tenth), ("last", turns - tenth, turns)):
        mean_mb = (kept[b - 1] - kept[a]) / (b - 1 - a) / 1e6
        print(f"{name} {tenth} turns: {sum(seconds[a:b]) / tenth * 1e3:.2f} ms CPU a turn, {mean_mb:.4f} MB a turn")
    print(f"all: {sum(seconds):.2f} s CPU, {(kept[-1] - kept[0]) / 1e6:.2f} MB")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
