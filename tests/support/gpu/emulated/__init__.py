"""The trainer's code for GPUs on a machine without one: a CUDA device whose kernels are those of the CPU.

A process has it where `cuda.load` runs before torch is imported; in the environment of `environment.emulating` each
Python process does so. `device.cpp` says what it hides. `flash` and `transformer_engine` are what CUDA alone has, by
their definitions.
"""
