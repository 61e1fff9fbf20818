"""Experts that take the place of vLLM's on a CPU."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil
import pytest

from tests.support.engine.vllm_ext.older_cpu import OLDER_CPU, OLDER_SERVER
from tests.support.engine.vllm_ext.serving import PROMPT, largest, make_model, running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is of x86")
def test_a_mixture_in_bfloat16_on_a_cpu_with_avx2_only(tmp_path: Path) -> None:
    """Two workers without shared memory, and no product in bfloat16: slower, and served."""
    model, folder = make_model(tmp_path / "model", "qwen2_moe"), tmp_path / "server" / "run"
    with running_server(folder, model, OLDER_SERVER, OLDER_CPU, dtype="bfloat16", tp=2) as running:
        workers = psutil.Process(running.process.pid).children(recursive=True)
        mapped = {Path(m.path).name for p in workers for m in p.memory_maps()}
        assert "_C_AVX2.abi3.so" in mapped
        tensors = running.adapter(1)
        base = running.score(None)
        got = running.score(running.publish(tensors))
    assert largest(base, running.logprobs(None, PROMPT)) < 0.1
    assert largest(got, running.logprobs(tensors, PROMPT)) < 0.2
    assert largest(got, base) > 0.5, "the adapter must show"
    assert (folder / "log").read_text().count("oneDNN has no products of bfloat16 on this CPU") == 2, "once a worker"
