"""Prepare every vLLM process (entry point ``vllm.general_plugins``): engines of our server, and CPU kernels.

On CPUs vLLM then supports LoRA on MoE experts, and its LoRA on linear layers is fast and correct. On other platforms
the plugin changes nothing in vLLM's own servers.
"""

import os
import signal

from areal_lora.processes.startup import die_with_parent

SERVER_PID = "AREAL_LORA_SERVER_PID"  # set by our server for the processes it has vLLM start


def register() -> None:
    """Register the plugin. vLLM calls this several times per process; it is idempotent."""
    from vllm.platforms import current_platform

    if os.environ.get(SERVER_PID, str(os.getpid())) != str(os.getpid()):
        die_with_parent(signal.SIGKILL)  # engine and workers do not notice that the server was killed
        from areal_lora.engine.vllm_ext.compat.engine import extend_engine_core

        extend_engine_core()

    if current_platform.is_cpu():
        from areal_lora.engine.vllm_ext.compat.cpu_kernels import install_cpu_lora

        install_cpu_lora()
