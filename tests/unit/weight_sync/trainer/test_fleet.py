"""Pings of all members at once, over a link that loses packets."""

from __future__ import annotations

import itertools
import time

import pytest

from areal_lora.errors import PublishError
from areal_lora.weight_sync.messages import PingReply, ServerEndpoint
from areal_lora.weight_sync.trainer.fleet import Fleet
from tests.support.weight_sync.helpers import RUN, SECRET

SERVERS = [ServerEndpoint(name=f"server-{i}", host="h", admin_port=i, data_port=9, workers=1) for i in range(3)]


class LossyFleet(Fleet):
    """A ping whose first packet is lost takes ``late_s``; ``lost`` names those of a server that are."""

    def __init__(self, lost: dict[str, set[int]], late_s: float) -> None:
        super().__init__(RUN, SECRET)
        self._lost, self._late_s = lost, late_s
        self.pings = {s.name: itertools.count() for s in SERVERS}

    def ping(self, server: ServerEndpoint, timeout_s: float) -> PingReply:
        if next(self.pings[server.name]) in self._lost.get(server.name, set()):
            time.sleep(min(self._late_s, timeout_s))
            if timeout_s < self._late_s:
                raise PublishError("timed out")
        return PingReply()


def test_a_ping_that_was_lost_is_repeated_within_the_same_time() -> None:
    fleet, began = LossyFleet({"server-1": {0}}, late_s=60.0), time.monotonic()
    assert fleet.silent(SERVERS, 1.0) == {}
    assert time.monotonic() - began < 1.0
    assert [next(fleet.pings[s.name]) for s in SERVERS] == [1, 2, 1], "the others are asked once"


def test_a_server_that_answers_neither_is_silent() -> None:
    fleet = LossyFleet({"server-1": {0, 1}, "server-2": {0}}, late_s=60.0)
    [(server, error)] = fleet.silent(SERVERS, 1.0).items()
    assert server.name == "server-1"
    with pytest.raises(PublishError):
        raise error


def test_a_refused_ping_is_not_repeated() -> None:
    class Refusing(LossyFleet):
        def ping(self, server: ServerEndpoint, timeout_s: float) -> PingReply:
            next(self.pings[server.name])
            raise PublishError("connection refused")

    fleet, began = Refusing({}, late_s=0.0), time.monotonic()
    assert len(fleet.silent(SERVERS, 4.0)) == 3
    assert time.monotonic() - began < 1.0
