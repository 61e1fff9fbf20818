"""A CPU with AVX2 only (no AVX-512, no bfloat16 instructions), on one that has more.

``OLDER_CPU`` is for the environment of a process: oneDNN, torch and numba read it. vLLM looks at the CPU itself:
``python -m tests.support.engine.vllm_ext.older_cpu`` is a rollout server that takes its library for such a CPU, which
has no shared memory between workers.
"""

from __future__ import annotations

import os
import sys

import llvmlite.binding
import torch.cpu


def _features() -> str:
    """LLVM's names of what this CPU has, without AVX-512; numba adds them to those of ``NUMBA_CPU_NAME``."""
    found = llvmlite.binding.get_host_cpu_features()
    return ",".join(f"{'+' if has and not name.startswith('avx512') else '-'}{name}" for name, has in found.items())


OLDER_CPU = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": _features(),
}
OLDER_SERVER = (sys.executable, "-m", "tests.support.engine.vllm_ext.older_cpu")


def main() -> int:
    from areal_lora.engine.vllm_ext.server.main import main as serve

    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        setattr(torch.cpu, name, lambda: False)
    return serve()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
