from __future__ import annotations

import msgspec
import pytest

from areal_lora.weight_sync import messages as tp


def test_messages_are_strict():
    request = tp.JoinRequest(
        run="r",
        ranks=[1, 2],
        timeout_s=3.0,
        endpoints=[tp.SourceEndpoint(source=0, host="h", port=1, world=3, token="t", bucket_bytes=9)],
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=tp.JoinRequest) == request
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(request))
    for bad in (raw | {"extra": 1}, raw | {"ranks": ["1"]}, {"run": "r"}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(bad), type=tp.JoinRequest)
