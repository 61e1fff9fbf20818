"""vLLM plugin (entry point ``vllm.general_plugins``), loaded in every vLLM process.

On CPUs it makes LoRA on MoE experts possible and LoRA on linear layers fast and right; on
other platforms it changes nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal

SERVER_PID = "AREAL_LORA_SERVER_PID"  # set by our server for the processes it has vLLM start
PR_SET_PDEATHSIG = 1


def register() -> None:
    """Called by vLLM, several times per process. Safe to repeat."""
    from vllm.platforms import current_platform

    if os.environ.get(SERVER_PID, str(os.getpid())) != str(os.getpid()):
        die_with_parent(signal.SIGKILL)  # engine and workers do not notice a killed server by themselves

    if current_platform.is_cpu():
        from areal_lora.engine.vllm_ext.compat.cpu_kernels import install_cpu_lora

        install_cpu_lora()


def die_with_parent(sig: signal.Signals) -> None:
    """Have the kernel send ``sig`` to this process when its parent dies, however that happens (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, sig)
