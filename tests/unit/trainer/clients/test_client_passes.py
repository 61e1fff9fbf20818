"""A client's pass: what is wrong with its data, the batch that it becomes, its loss and its answer."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from areal_lora.config.models import Config, TrainerConfig
from areal_lora.engine.common.arena import ParallelLayout
from areal_lora.engine.common.micro_batches import plans_of
from areal_lora.operations.protocol import Datum, Loss, LossSettings, Pass
from areal_lora.trainer.clients.client_passes import Limits, batch_of, carry_out, problem
from tests.support.operations.client import datum, floats
from tests.support.operations.side import client_adapter, service_config
from tests.support.operations.toy_engine import VOCABULARY, ToyEngine

LIMITS = Limits(vocabulary=VOCABULARY, longest=6)
GOOD = datum([1, 2, 3], [1.0, 0.0], [-1.0, -2.0], [0.5, -0.5])


def asked(*data: Datum, loss: Loss = Loss.PPO, backward: bool = True, **settings: float) -> Pass:
    return Pass(data=data, loss=loss, settings=LossSettings(**settings), backward=backward)


def test_a_pass_that_can_be_computed_has_no_problem() -> None:
    longest = datum([0, VOCABULARY - 1] * 3, [1.0] * 5, [-1.0] * 5, [0.0] * 5)
    assert [problem(asked(GOOD, longest, loss=loss), LIMITS) for loss in Loss] == [""] * len(Loss)
    assert problem(asked(datum([1, 2], [1.0]), loss=Loss.CROSS_ENTROPY), LIMITS) == ""


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (asked(), "a pass without data"),
        (asked(GOOD, clip_low=-0.1), "a setting of the loss is negative or not finite"),
        (asked(GOOD, beta=math.inf), "a setting of the loss is negative or not finite"),
        (asked(GOOD, clip_low=2.0), "the lower bound 2 of the ratio is above the upper one 1.2"),
        (asked(GOOD, datum([1], [])), "datum 1: 1 tokens, between 2 and 6 are possible"),
        (asked(datum([1] * 7, [1.0] * 6)), "datum 0: 7 tokens"),
        (asked(datum([1, VOCABULARY], [1.0])), f"datum 0: token {VOCABULARY} is not in the vocabulary"),
        (asked(datum([-1, 2], [1.0])), "datum 0: token -1 is not in the vocabulary"),
        (asked(datum([1, 2, 3], [1.0])), "datum 0: 1 weights for 2 targets"),
        (asked(datum([1, 2, 3], [1.0, 1.0])), "datum 0: 0 logprobs for 2 targets"),
        (asked(datum([1, 2, 3], [1.0, 1.0], [0.0, 0.0], [1.0])), "datum 0: 1 advantages for 2 targets"),
        (asked(datum([1, 2], [math.nan], [0.0], [0.0])), "datum 0: weights that are not finite"),
        (asked(datum([1, 2], [1.0], [math.inf], [0.0])), "datum 0: logprobs that are not finite"),
        (asked(datum([1, 2], [1.0], [math.nan]), loss=Loss.CROSS_ENTROPY), "datum 0: logprobs that are not finite"),
        (asked(Datum(tokens=b"\0\0\0\0\1", weights=b"")), "datum 0: an array is cut off"),
        (asked(Datum(tokens=GOOD.tokens, weights=GOOD.weights[:5])), "datum 0: an array is cut off"),
    ],
)
def test_what_cannot_be_computed_is_said_before(found: Pass, says: str) -> None:
    assert problem(found, LIMITS).startswith(says)


def test_the_limits_are_those_of_model_and_trainer() -> None:
    config: Any = SimpleNamespace(trainer=SimpleNamespace(max_tokens_per_microbatch=256, cp=2))
    shapes: list[Any] = [SimpleNamespace(vocab=9, max_positions=n) for n in (128, 1024, 0)]
    assert [Limits.of(config, shape).longest for shape in shapes] == [128, 512, 512]
    assert Limits.of(config, shapes[0]).vocabulary == 9


def test_entry_t_of_every_array_is_about_token_t() -> None:
    other = datum([7, 8], [2.0], [-3.0], [1.5])
    batch = batch_of({"a.1": asked(GOOD, other)})
    assert batch.token_ids.tolist() == [1, 2, 3, 7, 8]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.weights is not None
    assert batch.advantages is not None
    assert batch.weights.tolist() == [0.0, 1.0, 0.0, 0.0, 2.0]
    assert batch.loss_mask.tolist() == [False, True, False, False, True]
    assert batch.rollout_logprobs.tolist() == [0.0, -1.0, -2.0, 0.0, -3.0]
    assert batch.advantages.tolist() == [0.0, 0.5, -0.5, 0.0, 1.5]
    assert batch.adapters == ("a.1", "a.1")
    plain = batch_of({"a.1": asked(GOOD, other, loss=Loss.CROSS_ENTROPY)})
    assert plain.advantages is not None
    assert not plain.rollout_logprobs.any()
    assert not plain.advantages.any(), "cross entropy has neither, whatever was sent"


def test_passes_of_several_adapters_are_one_batch() -> None:
    plain, both = asked(datum([7, 8], [2.0]), loss=Loss.CROSS_ENTROPY), asked(GOOD, GOOD)
    batch = batch_of({"b.1": plain, "a.1": both})
    assert batch.token_ids.tolist() == [7, 8, 1, 2, 3, 1, 2, 3]
    assert batch.adapters == ("b.1", "a.1", "a.1")
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [0.0, 0.0, 0.0, 0.5, -0.5, 0.0, 0.5, -0.5]


def test_answers_of_a_prompt_compute_it_once() -> None:
    """Of one pass: another client's answers to the same prompt are computed with its own adapter."""
    prompts = [[1 + i, *range(40)] for i in range(2)]
    answers = [datum([*prompt, 90 + i], [1.0] * 41) for prompt in prompts for i in range(16)]
    one = asked(*answers, loss=Loss.CROSS_ENTROPY)
    batch = batch_of({"b.1": one, "a.1": one})
    layout = ParallelLayout.of(TrainerConfig(world_size=1), layers=1, experts=0)
    plans = plans_of(batch, layout, token_budget=4096)
    assert sum(plan.n_tokens for plan in plans) == 4 * (41 + 16)


def test_a_pass_with_and_without_gradients_answers_alike() -> None:
    engine: Any = ToyEngine()
    config: Config = service_config()
    adapter = client_adapter(config, "a")
    engine.add_adapter(adapter.spec, adapter.config.optimizer, 0)
    engine.residents["a.1"].parts["weight"] = torch.linspace(-1, 1, VOCABULARY)
    looked = carry_out(engine, {"a.1": asked(GOOD, backward=False)})["a.1"]
    assert not engine.residents["a.1"].gradient.any()
    learned = carry_out(engine, {"a.1": asked(GOOD)})["a.1"]
    assert engine.residents["a.1"].gradient.any()
    assert looked.logprobs == learned.logprobs
    assert looked.loss == pytest.approx(learned.loss)
    logits = np.linspace(-1, 1, VOCABULARY)
    scores = logits - np.log(np.exp(logits).sum())
    assert floats(looked.logprobs[0]) == pytest.approx([scores[2], scores[3]], abs=1e-6)
    ratio = math.exp(scores[2] + 1.0)
    assert looked.loss == pytest.approx(-min(ratio * 0.5, min(max(ratio, 0.8), 1.2) * 0.5), rel=1e-5)
