"""Tokens reach the ranks of their experts and come back: against one rank in float64, forward and backward."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.distributed.exchange_ranks import EXPERTS, Case, exchange, experts_of, make_tokens
from tests.support.distributed.spawn import run_ranks

pytestmark = pytest.mark.slow

CASES = {
    "one": Case(world=1),
    "ep2": Case(world=2),
    "etp2": Case(world=2, etp=2),
    "ep2_etp2": Case(world=4, etp=2),
    "ep4": Case(world=4),
    "an expert rank without tokens": Case(world=2, used=2),
    "bfloat16": Case(world=2, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_exchange_tokens_compute_what_one_computes(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    ranks = run_ranks(exchange, case.world, tmp_path, (case,), timeout_s=100.0)
    tokens = make_tokens(case)
    hidden, probs = tokens.hidden.double().requires_grad_(), tokens.probs.double().requires_grad_()
    scale = (probs * tokens.routing_map * (torch.arange(EXPERTS) + 1)).sum(1)
    out = hidden * scale[:, None]
    out.backward(tokens.grads.double())
    # Weights of experts that a token is not routed to have no gradient on the ranks either.
    assert probs.grad is not None
    want = {"out": out.detach(), "hidden": hidden.grad, "probs": probs.grad}
    rtol, atol = (0.0, 1e-5) if case.dtype == torch.float32 else (0.03, 0.05)
    for what, expected in want.items():
        got = np.concatenate([rank[what] for rank in ranks])
        np.testing.assert_allclose(got, expected.numpy(), rtol=rtol, atol=atol, err_msg=what)
    routed = tokens.routing_map.sum(0).tolist()
    for number, rank in enumerate(ranks):
        assert rank["counts"] == [routed[e] for e in experts_of(number, case)]
