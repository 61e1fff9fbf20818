"""Hold everything that relies on vLLM's private interfaces, written against vLLM 0.32.

Each module states what of vLLM it replaces and why. Those with ``cpu_`` in their names are imported on CPUs only: what
vLLM renames there does not stop a server with GPUs. A test compares every name that is used with the sources of vLLM.
"""
