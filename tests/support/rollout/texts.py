"""A tokenizer, a scorer and a served adapter for tests of workflows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from areal_lora.config.models import SamplingConfig
from areal_lora.data.prompts import Formatter, Prompt
from areal_lora.rollout.completion_client import CompletionClient
from areal_lora.rollout.custom_child import ContextFields
from areal_lora.rollout.routing import Router
from areal_lora.rollout.workflow import WorkflowContext
from areal_lora.tasks.reward_calls import Score, ScoreItem
from areal_lora.types import AdapterRef, Outcome, Sample
from tests.support.rollout.fake_server import FakeServer

V1, V2 = AdapterRef(name="math", version=1), AdapterRef(name="math", version=2)
EOS = 2
MAX_MODEL_LEN = 64
SAMPLING = SamplingConfig(prompts_per_step=4, n_samples=2, max_new_tokens=8, timeout_s=120.0)

FIELDS = ContextFields(
    model="no folder", format={}, sampling=SAMPLING.model_dump(), max_model_len=MAX_MODEL_LEN, streams=True
)
"""Those of a context of `served`, whose tokenizer a workflow in a worker does not have."""


class CharTokenizer:
    """One token per character; 2 ends a sequence. From 1000 on a token is two letters that `encode` makes two of."""

    chat_template = "{role}:{content}"
    eos_token_id = EOS

    def __call__(self, text: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(c) for c in t] for t in text]}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + [ord(c) for c in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        kept = (i for i in token_ids if i > 2 or not skip_special_tokens)
        return "".join(chr(i) if i < 1000 else 2 * chr(97 + i - 1000) for i in kept)

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool, **kwargs: object
    ) -> str:
        """``<user:question>`` and, of the assistant, what it said and the end of sequence."""
        pairs = [(m["role"], m["content"]) for m in conversation]
        return "".join(f"{said}\2" if role == "assistant" else f"<{role}:{said}>" for role, said in pairs)


@dataclass
class Graded:
    """Scores by a function of the completion; keeps what it was asked."""

    grade: Callable[[str], Score] = lambda text: Score(reward=float(len(text)), outcome=Outcome.OK)
    asked: list[ScoreItem] = field(default_factory=list)

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        self.asked += items
        return [self.grade(item.completion) for item in items]


def prompt_of(text: str, answer: str = "42") -> Prompt:
    return Prompt(
        uid="0:s",
        position=0,
        sample=Sample(uid="s", prompt=text, answer=answer),
        text=text,
        token_ids=[ord(c) for c in text],
    )


@asynccontextmanager
async def served(
    server: FakeServer, scorer: Graded, sampling: SamplingConfig = SAMPLING, secret: str = "run secret"
) -> AsyncIterator[WorkflowContext]:
    """A context whose client reaches ``server``, which serves and has announced its ``models``."""
    async with server:
        router = Router()
        for model in sorted(server.models):
            router.announce(AdapterRef.parse(model), {"server-0": server.url})
        async with CompletionClient(router, secret) as client:
            yield WorkflowContext(
                client=client,
                scorer=scorer,
                sampling=sampling,
                formatter=Formatter(tokenizer=CharTokenizer()),
                max_model_len=MAX_MODEL_LEN,
                streams=server.routes is None,
            )
