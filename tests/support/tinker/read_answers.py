"""A program with the SDK: reads answers of a service with the SDK's own classes. Rows as JSON in, counts and what was
wrong out.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections import Counter
from typing import Any

import httpx
import tinker
from tinker import types
from tinker._client import AsyncTinker
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types.client_config_response import ClientConfigResponse
from tinker.types.try_again_response import TryAgainResponse

FUTURES = (
    "create_model|unload_model|forward_backward|optim_step|save_weights|save_weights_for_sampler|save_weights_external"
    "|load_weights|asample"
)
EXPECTED = {
    FUTURES: types.UntypedAPIFuture,
    "create_session": types.CreateSessionResponse,
    "session_heartbeat": types.SessionHeartbeatResponse,
    "create_sampling_session": types.CreateSamplingSessionResponse,
    "get_info": types.GetInfoResponse,
    "weights_info": types.WeightsInfoResponse,
    "telemetry": types.TelemetryResponse,
    "client/config": ClientConfigResponse,
    "healthz": types.HealthResponse,
    "get_server_capabilities": types.GetServerCapabilitiesResponse,
    "checkpoints|training_runs/[^/]+/checkpoints": types.CheckpointsListResponse,
    "training_runs": types.TrainingRunsResponse,
    "training_runs/[^/]+": types.TrainingRun,
    "sessions": types.ListSessionsResponse,
    "sessions/[^/]+": types.GetSessionResponse,
    "samplers/.+": types.GetSamplerResponse,
}


def main() -> None:
    client = AsyncTinker(base_url="http://x", api_key="tml-x")
    read: Counter[str] = Counter()
    wrong: list[list[Any]] = []
    for method, path, status, kind, text in json.load(sys.stdin):
        content = base64.b64decode(text)
        try:
            if status >= 400:
                read[refused(client, method, path, status, content)] += 1
            else:
                read[answer(method, path, kind, content)] += 1
        except Exception as error:  # fault boundary: what the SDK cannot read is what is asked for  # noqa: BLE001
            wrong.append([method, path, status, repr(error)[:300], content[:300].decode(errors="replace")])
    json.dump({"read": read, "wrong": wrong[:10]}, sys.stdout)


def refused(client: Any, method: str, path: str, status: int, content: bytes) -> str:
    """The class of the error that the SDK raises."""
    request = httpx.Request(method, f"http://x{path}")
    response = httpx.Response(status, content=content, request=request, headers={"Content-Type": "application/json"})
    error = client._make_status_error_from_response(response)
    assert isinstance(error, tinker.APIStatusError)
    assert error.status_code == status
    assert set(error.body["error"]) == {"path", "reason", "fix"}
    assert error.body["error"]["reason"] in str(error) or "\\" in str(error)
    return type(error).__name__


def answer(method: str, path: str, kind: str, content: bytes) -> str:
    name = path.removeprefix("/api/v1/")
    if name == "retrieve_future":
        return outcome(kind, content)
    if not content or name in ("cancel_future", "client/dynamic_config") or (method, name.count("/")) == ("POST", 2):
        return "NoneType"
    (model,) = [model for pattern, model in EXPECTED.items() if re.fullmatch(pattern, name)]
    found = model.model_validate(json.loads(content))
    return type(found).__name__


def outcome(kind: str, content: bytes) -> str:
    if kind == "application/x-protobuf":
        for read in (deserialize_sample_response, deserialize_forward_backward_output):
            try:
                found = read(content)
            except Exception:  # fault boundary: it is the other one  # noqa: BLE001
                continue
            if getattr(found, "sequences", None) or getattr(found, "loss_fn_outputs", None):
                return type(found).__name__
        raise AssertionError("neither a pass nor a sample")
    said = json.loads(content)
    if "error" in said:
        return type(types.RequestFailedResponse.model_validate(said)).__name__
    if said.get("type") == "try_again":
        assert said["queue_state"] in ("active", "paused_capacity", "paused_rate_limit")
        return type(TryAgainResponse.model_validate(said)).__name__
    if "metrics" in said:
        return type(types.OptimStepResponse.model_validate(said)).__name__
    if "sampling_session_id" in said:
        return "SaveWeightsForSamplerResponse"
    model = types.CreateModelResponse if "path" not in said else types.SaveWeightsResponse
    return type(model.model_validate(said)).__name__


if __name__ == "__main__":
    main()
