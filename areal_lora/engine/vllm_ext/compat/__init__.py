"""Hold everything that relies on vLLM's private interfaces, written against vLLM 0.32.

================ ============================== =========================================================
module           what                           why
================ ============================== =========================================================
``cpu_kernels``  ``CpuLoraExperts``             with LoRA vLLM picks its Triton experts, which need a GPU
                 ``PackedExperts``              torch's matmul of a few rows is slow; vLLM's linear
                                                layers use the same oneDNN kernels
                 ``PlainExperts``               oneDNN has no bfloat16 on CPUs with AVX2 only
                 ``CpuLoraLinear`` (punica)     vLLM's CPU path is slow, and base tokens (-1) read the
                                                last slot
                 ``hide_llvmlite``              vLLM's scan of all loaded modules fails on numba's
                                                compiler
``weights``      ``bound_matrices``             where a worker keeps the stacked weights of all adapters
                 ``activate``, ``deactivate``   vLLM loads adapters from files only, and evicts them
                                                without a request to do so
                 ``refuse_files``               the same
``engine``       ``start_engine``               on CPUs vLLM starts new interpreters, which import
                                                everything again
                 ``own_logprobs``               vLLM's lack the temperature, or follow top-p; the
                                                trainer's do neither
``cpu_scheduler`` ``GroupScheduler``            vLLM computes a prompt once per sample, and sends every token to
                                                the server's process
================ ============================== =========================================================

Modules with ``cpu_`` in their names are imported on CPUs only: what vLLM renames there does not stop a server with
GPUs. A test compares every name that is used with the sources of vLLM.
"""
