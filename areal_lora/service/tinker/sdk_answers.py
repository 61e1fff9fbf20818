"""Answers of ``retrieve_future``: what the queue has, in the SDK's words."""

from __future__ import annotations

import math
from typing import Any, assert_never

import msgspec
from starlette.responses import Response

from areal_lora.operations.protocol import OperationFailure, PassResult, StepResult
from areal_lora.service.queue.requests import (
    Answer,
    CreatedModel,
    LoadedModel,
    OpenedSampler,
    Pending,
    StoredState,
    UnloadedModel,
)
from areal_lora.service.tinker.passes import scored_body

JSON, PROTOBUF = "application/json", "application/x-protobuf"


def retrieved(answer: Answer | Pending, request: str) -> Response:
    """A passing state and a failure are answers as well: an HTTP error would mean that retrieving has failed."""
    match answer:
        case PassResult():
            return Response(scored_body(answer), media_type=PROTOBUF)
        case _:
            return answered(_fields(answer, request))


def answered(fields: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(fields), status, media_type=JSON)


def _fields(
    answer: StepResult
    | CreatedModel
    | LoadedModel
    | StoredState
    | OpenedSampler
    | UnloadedModel
    | OperationFailure
    | Pending,
    request: str,
) -> dict[str, Any]:
    match answer:
        case StepResult(step=step, grad_norm=grad_norm, skipped=skipped):
            figures = {"step": float(step), "grad_norm": grad_norm, "skipped": float(skipped)}
            return {"metrics": {name: value for name, value in figures.items() if math.isfinite(value)}}
        case CreatedModel(model=model, path=path):
            return {"model_id": model} | ({} if path is None else {"path": path})
        case LoadedModel(model=model, path=path):
            return {"model_id": model, "path": path}
        case StoredState(path=path):
            return {"path": path}
        case OpenedSampler(sampler=sampler):
            return {"sampling_session_id": sampler}
        case UnloadedModel(model=model):
            return {"model_id": model, "type": "unload_model"}
        case OperationFailure(reason=reason, by_client=by_client):
            return {"error": reason, "category": "user" if by_client else "server"}
        case Pending(reason=reason, capacity=capacity):
            state = "paused_capacity" if capacity else "active"
            return {"type": "try_again", "request_id": request, "queue_state": state, "queue_state_reason": reason}
        case _:
            assert_never(answer)
