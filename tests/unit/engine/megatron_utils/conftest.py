"""Megatron as it is imported on CPUs, which takes seconds: not while tests are collected."""

import pytest

from areal_lora.engine.megatron_utils.cpu_patches import install_cpu_patches


@pytest.fixture(scope="session")
def cpu_patches() -> None:
    install_cpu_patches()
