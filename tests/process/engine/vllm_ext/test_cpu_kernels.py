"""Draws, norms and experts that take the place of vLLM's on a CPU."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from areal_lora.engine.vllm_ext.compat.cpu_kernels import rms_norm
from areal_lora.engine.vllm_ext.compat.cpu_sampler import AHEAD, CpuDraw, Numbers
from tests.support.engine.vllm_ext.older_cpu import OLDER_CPU, OLDER_SERVER
from tests.support.engine.vllm_ext.serving import PROMPT, connect, largest, make_model, start

pytestmark = pytest.mark.slow  # importing vLLM

ROWS, VOCAB, HIDDEN = 12, 50, 128


@pytest.mark.parametrize("top_p", [None, 0.7])
def test_tokens_are_those_that_vllm_draws(top_p: float | None) -> None:
    """Rows with a generator of their own and rows without, for several steps of the same generators."""
    p = None if top_p is None else torch.full((ROWS,), top_p)
    drawn = []
    for draw in (TopKTopPSampler("processed_logprobs").forward_cpu, CpuDraw()):
        generators = {row: torch.Generator().manual_seed(100 + row) for row in (0, 3, 4, 11)}
        torch.manual_seed(5)
        numbers = torch.Generator().manual_seed(1)
        steps = []
        for step in range(AHEAD + 6):  # more than are drawn at once
            if step == 3:
                generators[1] = generators.pop(11)  # vLLM moves a request to the row of one that has ended
            steps.append(draw(torch.randn(ROWS, VOCAB, generator=numbers), generators, None, p))
        drawn.append(steps)
    for (theirs, their_logprobs), (ours, our_logprobs) in zip(*drawn, strict=True):
        assert theirs.tolist() == ours.tolist()
        assert torch.equal(their_logprobs, our_logprobs)


def test_a_generator_keeps_its_place_while_its_request_holds_it() -> None:
    """Of many requests that come and go one is preempted meanwhile; vLLM drops the generators of those that ended."""
    numbers, preempted = Numbers(), torch.Generator().manual_seed(1)
    one_by_one = torch.Generator().manual_seed(1)
    want = [int(torch.randint(0, 2**31, (1,), generator=one_by_one)) for _ in range(2)]
    got = numbers.take({0: preempted})
    for seed in range(4 * AHEAD):
        numbers.take({0: torch.Generator().manual_seed(seed)})
    assert len(numbers._streams) <= AHEAD + 4
    assert got + numbers.take({7: preempted}) == want


@pytest.fixture(scope="module")
def norm() -> RMSNorm:
    before = dict(os.environ)
    with set_current_vllm_config(VllmConfig()):
        module = RMSNorm(HIDDEN, eps=1e-6)
    # vLLM's configuration preloads libraries into every later child process, which fails in a path with a space.
    os.environ.clear()
    os.environ.update(before)
    module.weight.data = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(2))
    return module


def normed(x: torch.Tensor, module: RMSNorm) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt() * module.weight.data.double()


@pytest.mark.parametrize("shape", [(1, HIDDEN), (7, HIDDEN), (5, 4, HIDDEN)])
def test_norm_of_rows(norm: RMSNorm, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(rms_norm(norm, x).double(), normed(x, norm), atol=1e-5)


def test_norm_of_rows_that_do_not_follow_each_other(norm: RMSNorm) -> None:
    """Queries are a part of the columns of the projection's result."""
    x = torch.randn(6, 4 * HIDDEN, generator=torch.Generator().manual_seed(4))[:, HIDDEN : 3 * HIDDEN]
    heads = x.view(6, 2, HIDDEN)
    assert not heads.is_contiguous()
    assert torch.allclose(rms_norm(norm, heads).double(), normed(heads, norm), atol=1e-5)


@pytest.mark.parametrize("apart", [False, True])
def test_norm_of_a_sum(norm: RMSNorm, apart: bool) -> None:
    """Returns the normed sum and the sum, whether or not the rows follow each other."""
    numbers = torch.Generator().manual_seed(6)
    x, residual = (torch.randn(6, HIDDEN * (1 + apart), generator=numbers)[:, :HIDDEN] for _ in range(2))
    total = x.double() + residual.double()
    out, kept = rms_norm(norm, x, residual)
    assert torch.allclose(kept.double(), total, atol=1e-6)
    assert torch.allclose(out.double(), normed(total, norm), atol=1e-5)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is of x86")
def test_a_mixture_in_bfloat16_on_a_cpu_with_avx2_only(tmp_path: Path) -> None:
    """Two workers without shared memory, and no product in bfloat16: slower, and served."""
    model, folder = make_model(tmp_path / "model", "qwen2_moe"), tmp_path / "server" / "run"
    process = start(folder, model, OLDER_SERVER, OLDER_CPU, dtype="bfloat16", tp=2)
    try:
        running = connect(folder, model, process)
        workers = psutil.Process(process.pid).children(recursive=True)
        mapped = {Path(m.path).name for p in workers for m in p.memory_maps()}
        assert "_C_AVX2.abi3.so" in mapped
        tensors = running.adapter(1)
        base = running.score(None)
        got = running.score(running.publish(tensors))
        running.source.close()
    finally:
        process.terminate()
        process.wait(20)
    assert largest(base, running.logprobs(None, PROMPT)) < 0.1
    assert largest(got, running.logprobs(tensors, PROMPT)) < 0.2
    assert largest(got, base) > 0.5, "the adapter must show"
    assert (folder / "log").read_text().count("oneDNN has no products of bfloat16 on this CPU") == 2, "once a worker"
