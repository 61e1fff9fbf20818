"""What differs between device types, as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from areal_lora.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """``collective`` is the torch.distributed backend string, ``xccl`` the weight-sync group's backend."""

    device_type: str
    collective: str
    xccl: str


PLATFORMS = {
    "cpu": Platform(device_type="cpu", collective="gloo", xccl="gloo"),
    "cuda": Platform(device_type="cuda", collective="cpu:gloo,cuda:nccl", xccl="nccl"),
    "npu": Platform(device_type="npu", collective="cpu:gloo,npu:hccl", xccl="hccl"),
}


def platform_of(device: torch.device | str) -> Platform:
    """Raises ConfigError for a device type that is not in the table."""
    kind = torch.device(device).type
    if kind not in PLATFORMS:
        raise ConfigError("cluster.device", f"{kind!r} is not supported", f"one of {', '.join(PLATFORMS)}")
    return PLATFORMS[kind]
