"""Differences between device types, as data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from areal_lora.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """``collective`` is the torch.distributed backend string of the trainer's own groups."""

    device_type: str
    collective: str


PLATFORMS = {
    "cpu": Platform(device_type="cpu", collective="gloo"),
    "cuda": Platform(device_type="cuda", collective="cpu:gloo,cuda:nccl"),
    "npu": Platform(device_type="npu", collective="cpu:gloo,npu:hccl"),
}


PAGE_BYTES = 4096


def own_device(kind: str, local_rank: int) -> torch.device:
    """Select this process's device among the visible ones and make it current in the calling thread.

    Every other thread must select it too: a thread starts on device 0.
    """
    if platform_of(kind).device_type == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, local_rank)
    torch.get_device_module(device).set_device(device)
    return device


def host_buffer(nbytes: int, device: torch.device) -> np.ndarray:
    """uint8 [nbytes] on the host with all pages mapped; page-locked if ``device`` is an accelerator."""
    if device.type != "cpu":
        pinned: np.ndarray = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned
    buffer = np.empty(nbytes, dtype=np.uint8)
    buffer[::PAGE_BYTES] = 0
    return buffer


def platform_of(device: torch.device | str) -> Platform:
    """Raises ConfigError for a device type that is not in the table."""
    kind = torch.device(device).type
    if kind not in PLATFORMS:
        raise ConfigError("cluster.device", f"{kind!r} is not supported", f"one of {', '.join(PLATFORMS)}")
    return PLATFORMS[kind]
