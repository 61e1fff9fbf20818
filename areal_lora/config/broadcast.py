"""Which library carries adapter versions from trainer ranks to servers. Pure."""

from __future__ import annotations

from areal_lora.config.models import Config
from areal_lora.config.pools import shared_devices

OF_DEVICES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""The library that sends the memory of each kind of device."""


def broadcast_backend(config: Config) -> str:
    """The name of a row of ``weight_sync.link.backends``; the same in every process of a run.

    NCCL and HCCL refuse two members on one device. gloo sends host memory, page-locked where there are devices.
    Raises ConfigError where the processes do not fit their nodes.
    """
    chosen = config.weight_sync.backend
    if chosen != "auto":
        return chosen
    return "gloo" if shared_devices(config) else OF_DEVICES[config.cluster.device]
