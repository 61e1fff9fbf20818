"""``python -m tests.support.engine.vllm_ext.second_server``: a rollout server with the model runner that GPUs have.

Its Triton kernels are interpreted (`triton_interpreter`), and vLLM's own scheduler and routes are used, which belong to
that runner. Hidden: what `triton_interpreter` hides, asynchronous steps, and attention, which is that of CPUs.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

SECOND_SERVER = (sys.executable, "-m", "tests.support.engine.vllm_ext.second_server")
SECOND_RUNNER = "AREAL_LORA_TEST_SECOND_RUNNER"
"""In the environment of a test: its servers have the second model runner."""


def _replace_truncation() -> None:
    """By vLLM's function without Triton: an argument of its kernel is an integer in the interpreter, and no tensor."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    from vllm.v1.worker.gpu.sample import sampler

    # From vLLM 0.33 on it is told which rows have both.
    sampler.apply_top_k_top_p = lambda x, k, p, **_: apply_top_k_top_p_pytorch(x, k, p, allow_cpu_sync=True)


def main() -> int:
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    from tests.support.engine.vllm_ext.triton_interpreter import install  # Triton reads the environment at import

    install()
    _replace_truncation()
    from areal_lora.engine.vllm_ext.server import assemble
    from areal_lora.engine.vllm_ext.server.main import main as serve

    plain = assemble.engine_args

    def engine_args(config: Any) -> Any:
        routes = config.behaviour.router_replay == "rollout"
        return replace(plain(config), scheduler_cls=None, additional_config={}, enable_return_routed_experts=routes)

    assemble.engine_args = engine_args
    return serve()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
