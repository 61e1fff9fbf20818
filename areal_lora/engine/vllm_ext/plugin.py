"""vLLM plugin (entry point ``vllm.general_plugins``), loaded in every vLLM process.

On CPUs it makes LoRA on MoE experts possible and LoRA on linear layers fast and right; on
other platforms it changes nothing.
"""

from __future__ import annotations


def register() -> None:
    """Called by vLLM, several times per process. Safe to repeat."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from areal_lora.engine.vllm_ext.compat import install_cpu_lora

        install_cpu_lora()
