"""What a truncated distribution keeps, no more than k of equal logits; prompts' log-probabilities, in chunks."""

from __future__ import annotations

import math
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.lazy import Lazy

runner = Lazy("areal_lora.engine.vllm_ext.compat.first_runner")
SIZES, TEMPERATURES, VOCABULARY = {"a": 1, "b": 13, "c": 8, "d": 9, "e": 12}, (1.0, 0.5, 2.0, 1.0, 0.5), 40


def test_of_equal_logits_no_more_than_k_are_kept() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0], [0.0, 3.0, 2.0, 2.0, 1.0], [-1.0, -2.0, -3.0, -4.0, -5.0]])
    found = runner.keep_first(logits.clone(), torch.tensor([2, 3, 5]))
    assert (found > -math.inf).sum(1).tolist() == [2, 3, 5]
    assert found[1].tolist() == [-math.inf, 3.0, 2.0, 2.0, -math.inf]
    assert torch.equal(found[2], logits[2])


@pytest.mark.parametrize("step", [13, 5, 4])
def test_prompts_are_scored_in_chunks_at_their_temperatures(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """vLLM's method, for prompts that the engine computes at once or in steps."""
    monkeypatch.setattr("areal_lora.engine.vllm_ext.compat.first_runner.CHUNK", 4)
    draw = torch.Generator().manual_seed(step)
    weights = {name: torch.randn(n, VOCABULARY, generator=draw) for name, n in SIZES.items()}
    tokens = {name: torch.randint(VOCABULARY, (n,), generator=draw).tolist() for name, n in SIZES.items()}
    rows = list[int]()

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return hidden

    requests = {
        name: SimpleNamespace(
            prompt_token_ids=tokens[name],
            num_computed_tokens=0,
            in_progress_prompt_logprobs_cpu=None,
            sampling_params=SimpleNamespace(extra_args={runner.SCORE_TEMPERATURE: temperature}),
        )
        for name, temperature in zip(SIZES, TEMPERATURES, strict=True)
    }
    engine: Any = SimpleNamespace(
        num_prompt_logprobs=dict.fromkeys(SIZES, 0),
        requests=requests,
        device=torch.device("cpu"),
        input_batch=SimpleNamespace(req_id_to_index={name: i for i, name in enumerate(SIZES)}),
        model=SimpleNamespace(compute_logits=compute_logits),
        model_config=SimpleNamespace(logprobs_mode="processed_logprobs"),
        sampler=runner.Sampler("processed_logprobs"),
        _sync_device=lambda: None,
    )
    engine._get_prompt_logprobs_dict = MethodType(runner.GPUModelRunner._get_prompt_logprobs_dict, engine)
    runner.FirstRunner(engine)._own_prompts()
    found: dict[str, Any] = {}
    while engine.num_prompt_logprobs:
        at = {name: requests[name].num_computed_tokens for name in SIZES}
        scheduled = {name: min(step, n - at[name]) for name, n in SIZES.items() if n > at[name]}
        starts = torch.tensor([0, *(scheduled.get(name, 0) for name in SIZES)]).cumsum(0)
        engine.query_start_loc = SimpleNamespace(np=starts.numpy())
        hidden = torch.cat([weights[name][at[name] : at[name] + n] for name, n in scheduled.items()])
        with torch.compiler.set_stance("force_eager"):  # it compiles one for each length, for ten seconds
            found |= engine._get_prompt_logprobs_dict(hidden, scheduled)
        for name, n in scheduled.items():
            requests[name].num_computed_tokens += n
    assert max(rows) == 4
    for (name, ids), temperature in zip(tokens.items(), TEMPERATURES, strict=True):
        logprobs = (weights[name].double() / temperature).log_softmax(1)
        wanted = [float(logprobs[t, token]) for t, token in enumerate(ids[1:])]
        assert found[name].logprobs[:, 0].tolist() == pytest.approx(wanted, abs=1e-5)
