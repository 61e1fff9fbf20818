from __future__ import annotations

import msgspec
import pytest

from areal_lora.errors import AdapterError, ManifestError, ParityError, PublishError
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.link.relays import RelayGroup
from areal_lora.weight_sync.messages import ServerEndpoint
from areal_lora.weight_sync.trainer.decisions import (
    Attempt,
    Decision,
    Fail,
    Failure,
    FinishPublish,
    PublishReport,
    Wait,
)

SERVER = ServerEndpoint(name="server-0", host="h", admin_port=1, data_port=2, workers=1)
REPORT = PublishReport(ref=AdapterRef(name="a", version=1), digest="d", nbytes=8, phases={"ack": 1.0}, servers=())


@pytest.mark.parametrize(
    "step",
    [
        FinishPublish(report=REPORT),
        Fail(failure=Failure(kind="failed", message="x")),
        Wait(),
        Attempt(),
        Attempt(groups=[RelayGroup((SERVER,)), RelayGroup((), SERVER)], sources=[0, 3], shared=False),
    ],
)
def test_every_step_reaches_the_other_ranks_as_it_is(step):
    decision = Decision(step=step, left_s=1.5, form_left_s=3.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(decision), type=Decision) == decision


@pytest.mark.parametrize("error", [ManifestError("hash", "x"), AdapterError("x"), ParityError("x"), PublishError("x")])
def test_every_rank_raises_the_same_error(error):
    raised = Failure.of(error).error()
    assert (type(raised), str(raised)) == (type(error), str(error))
