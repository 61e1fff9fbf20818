"""The receiving process of a ``Pair``: what it does, without the imports of servers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

import tests.support.weight_sync  # registers the backend of sockets  # noqa: F401
from areal_lora.errors import PublishError
from areal_lora.weight_sync.link.broadcast_groups import join_group
from areal_lora.weight_sync.link.inbox import Part
from areal_lora.weight_sync.messages import SourceEndpoint

SECRET = "cd" * 32


def receive(pipe: Connection, endpoint: SourceEndpoint, device: str, parts: Sequence[Part], timeout_s: float) -> None:
    """A receiver: join, then receive versions until told to stop; answer each with its digest or the error."""
    place = torch.device(device)
    torch.zeros(1, device=place)  # a context of its own
    try:
        group = join_group(endpoint, 1, "127.0.0.1", timeout_s, SECRET, place)
    except PublishError as e:
        pipe.send(f"error: {e}")
        return
    pipe.send("joined")
    while pipe.recv() == "receive":
        digest = hashlib.blake2b()
        inbox = group.receive(parts, time.monotonic() + timeout_s)
        pipe.send("posted")
        try:
            for _ in parts:
                digest.update(inbox.take().tobytes())
            inbox.finish()
            pipe.send(digest.hexdigest())
        except PublishError as e:
            pipe.send(f"error: {e}")
            return
