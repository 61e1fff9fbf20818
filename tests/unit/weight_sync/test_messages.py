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
    assert tp.decode_message(tp.encode_message(request), tp.JoinRequest) == request
    raw = msgspec.msgpack.decode(tp.encode_message(request))
    for bad in (raw | {"extra": 1}, raw | {"ranks": ["1"]}, {"run": "r"}):
        with pytest.raises(msgspec.ValidationError):
            tp.decode_message(msgspec.msgpack.encode(bad), tp.JoinRequest)
