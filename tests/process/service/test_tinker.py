"""Unmodified SDKs of tinker, two versions and two tenants at a time, with the real service and a scripted trainer."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from areal_lora.operations.protocol import Datum, OptimStep, Pass, Poison
from areal_lora.service.tinker import passes
from tests.support.clocks import wait_until
from tests.support.operations.scripted_trainer import scores
from tests.support.sizes import sample
from tests.support.tinker.scripted import ScriptedRun
from tests.support.tinker.sdk import VERSIONS, sdk_path
from tests.support.tinker.tenant_world import sample_body

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TENANTS = dict(zip(VERSIONS, ("acme", "bolt"), strict=True))
ONE = sample(VERSIONS, 1)
"""Of programs that differ in nothing but the SDK's version."""
STEPS = 4
TOKENS = [5, 6, 7, 8, 9]
NEVER = "s000000000000"


def scored(weights: list[float], steps: int, tokens: list[int] = TOKENS) -> tuple[list[float], float]:
    """Log-probabilities and loss that the scripted trainer has after so many steps."""
    one = Datum(tokens=np.array(tokens, "<i4").tobytes(), weights=np.array(weights, "<f4").tobytes())
    found = scores((one,), steps)
    return np.frombuffer(found.logprobs[0], "<f4").tolist(), found.loss


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedRun]:
    for version in VERSIONS:
        sdk_path(version)
    with ScriptedRun(tmp_path_factory.mktemp("a run"), limits={"adapters": 8}) as run:
        yield run


@pytest.fixture(scope="module")
def keys(run: ScriptedRun) -> dict[str, str]:
    return {version: run.tenant(tenant) for version, tenant in TENANTS.items()}


@pytest.fixture(scope="module")
def tours(run: ScriptedRun, keys: dict[str, str]) -> dict[str, dict[str, Any]]:
    begun = {version: run.begin(version, "tour.py", keys[version]) for version in VERSIONS}
    return {version: run.end(process) for version, process in begun.items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_training(tours: dict[str, dict[str, Any]], version: str) -> None:
    said, weights = tours[version], [1.0, 1.0, 0.0, 1.0]
    model = said["model"]
    assert said["warned"] == ["train_unembed is ignored: this service trains attention and MLP, not the output layer"]
    assert (said["info"], said["text"], said["models"]) == (["tiny_model", True, 4], "1 + 1", ["tiny_model"])
    row, loss = scored(weights, 0)
    assert said["many"] == [1030, pytest.approx(1030 * loss), row]
    assert said["step"] == {"step": 1.0, "grad_norm": 2.0, "skipped": 0.0}, "two chunks, one window"
    row, loss = scored(weights, 1)
    assert said["forward"] == {"loss:sum": pytest.approx(loss)}
    assert said["custom"]["squares"] == pytest.approx(sum(each**2 for each in row), rel=1e-5)
    for error, text in said["poisoned"]:
        assert error == "RequestFailedError"
        assert "target 0 counts, and is not the input token that follows it" in text
    error, text = said["refused step"]
    assert error == "RequestFailedError"
    assert "adam_params.learning_rate" in text
    assert said["after"] == {"step": 2.0, "grad_norm": 1.0, "skipped": 0.0}, "the window after it is another one"
    session = model.partition(":")[0]
    for case, reason in (("unnamed", "is no name"), ("taken", "there is a saved state")):
        error, text = said[case]
        assert (error, reason in text) == ("RequestFailedError", True), text
    assert said["saved"] == [f"tinker://{model}/weights/one", f"{session}:train:1", 3.0]


@pytest.mark.parametrize("version", VERSIONS)
def test_sampling_and_lists(run: ScriptedRun, tours: dict[str, dict[str, Any]], version: str) -> None:
    said = tours[version]
    model = said["model"]
    session, path = model.partition(":")[0], f"tinker://{model}/sampler_weights/sampler"
    assert said["sampled"] == [path, [[[5, 6, 7], [-5 / 64, -6 / 64, -7 / 64], "length"]] * 2]
    assert said["scores"] == [None, -4 / 64]
    assert said["newest"] == said["base"] == [5, 6, 7]
    assert said["rl"] == scored([1.0] * 4, 2, [3, 4, 5, 6, 7])[0]
    error, text = said["refused"]
    assert error == "UnprocessableEntityError"
    assert "images and sounds are not supported" in text
    rows = [None, [[4, -4 / 64], [5, -4 / 64 - 1]]]
    assert said["top"] == [[None, -4 / 64], rows, [5, 6, 7]]
    assert said["runs"] == [f"{session}:train:0", f"{session}:train:1"], "of this tenant alone"
    assert said["listed"] == [path, f"tinker://{model}/weights/one"]
    assert said["deleted"] == [path]
    assert said["weights"] == 4
    lists = said["lists"]
    assert lists["pages"] == [[path], [f"tinker://{model}/weights/one"], []], "newest first"
    assert (lists["total"], lists["runs"]) == (2, [f"{session}:train:0"])
    assert lists["run"] == [4, {"purpose": "a tour"}, f"tinker://{model}/weights/one"]
    assert lists["sessions"] == [[session], []]
    assert lists["session"] == [[f"{session}:train:0", f"{session}:train:1"], 3]
    assert lists["sampler"] == path
    for (error, text), reason in zip(said["unsupported"], ("of one tenant alone",) * 2 + ("no model",), strict=True):
        assert (error in ("UnprocessableEntityError", "NotFoundError"), reason in text) == (True, True), text
    own = [body for body in run.asked if f"{TENANTS[version]}-{session}" in body["model"]]
    assert {(body["temperature"], body["seed"]) for body in own} == {(0.5, 1), (1.0, None)}
    stops = [(body["stop"], body["stop_token_ids"], body["ignore_eos"]) for body in own[-4:]]
    assert stops == [(["one", "two"], [], False), ([], [5, 6], False), (["three"], [], False), ([], [], True)]
    assert all("@v" in body["model"] and body["pin_version"] for body in own), "snapshots are of one version"
    assert [body["model"] for body in run.asked].count("base") == len(VERSIONS)


def test_a_session_learns_at_once_that_no_place_is_free(run: ScriptedRun, tours: dict[str, dict[str, Any]]) -> None:
    """Later versions report a queue state only once it has lasted for 15 minutes."""
    keys = {version: run.tenant(f"small{k}", adapters=1, queued=1) for k, version in enumerate(ONE)}
    begun = {version: run.begin(version, "crowded.py", keys[version]) for version in ONE}
    for process in begun.values():
        said = run.end(process)
        name = said["model"].replace(":train:", "-")
        error, text = said["error"]
        assert (error, "1 models of this session have every place" in text) == ("UnprocessableEntityError", True), text
        assert f"areal-lora adapters delete RUN {name}" in text
        waits = f"a new model waits for a place: the quota of 1 adapters is used; yours are {name}"
        assert len([text for text in said["warned"] if waits in text]) == 1, said["warned"]
        assert said["scored"] == 1025, "two chunks, of which one at a time may wait"


def test_every_pass_reached_the_trainer_once(run: ScriptedRun, tours: dict[str, dict[str, Any]]) -> None:
    for version, said in tours.items():
        session = said["model"].partition(":")[0]
        adapter = f"{TENANTS[version]}-{session}-0"
        done = [operation for operation in run.trainer.carried_out if operation.adapter.rpartition(".")[0] == adapter]
        assert [operation.number for operation in done] == list(range(1, len(done) + 1))
        kinds = [type(operation.what) for operation in done]
        assert kinds[:8] == [Pass, Pass, OptimStep, Pass, Pass, Pass, Poison, OptimStep]
        sizes = [len(operation.what.data) for operation in done if isinstance(operation.what, Pass)]
        assert sizes[:2] == [1024, 6], "two chunks"


def test_tenants_do_not_reach_each_others_models(
    run: ScriptedRun, keys: dict[str, str], tours: dict[str, dict[str, Any]]
) -> None:
    """Word for word the answer for what does not exist."""
    mine, other = VERSIONS
    model = tours[other]["model"]
    actions: list[tuple[str, str, dict[str, Any] | None]] = [
        ("POST", "get_info", {"model_id": model}),
        ("POST", "optim_step", {"model_id": model, "seq_id": 99, "adam_params": {}}),
        ("POST", "save_weights", {"model_id": model, "seq_id": 99, "path": "x"}),
        ("POST", "save_weights_for_sampler", {"model_id": model, "seq_id": 99, "path": "x"}),
        (
            "POST",
            "load_weights",
            {"model_id": model, "seq_id": 99, "path": f"tinker://{model}/weights/x", "optimizer": True},
        ),
        ("POST", "retrieve_future", {"request_id": f"{model}:1"}),
        ("POST", "weights_info", {"tinker_path": f"tinker://{model}/sampler_weights/sampler"}),
        ("POST", "session_heartbeat", {"session_id": model.partition(":")[0]}),
        ("GET", f"training_runs/{model}", None),
        ("DELETE", f"training_runs/{model}/checkpoints/sampler_weights/sampler", None),
        ("GET", f"samplers/{model.replace('train', 'sample')}", None),
        ("POST", "retrieve_future", {"request_id": f"{model.replace('train', 'sample')}:0"}),
    ]
    session = model.partition(":")[0]
    with httpx.Client(base_url=run.url, headers={"X-API-Key": keys[mine]}, timeout=150.0) as http:
        for method, path, body in actions:
            there = http.request(method, f"/api/v1/{path}", json=body)
            no_path, no_body = (json.loads(json.dumps(each).replace(session, NEVER)) for each in (path, body))
            unknown = http.request(method, f"/api/v1/{no_path}", json=no_body)
            assert (there.status_code, unknown.status_code) in [(404, 404), (410, 410)], (path, there.text)
            assert there.text.replace(session, NEVER) == unknown.text, path
    with httpx.Client(base_url=run.url, headers={"X-API-Key": "tml-none"}, timeout=150.0) as http:
        assert http.post("/api/v1/create_session", json={}).status_code == 401


def test_a_program_does_not_notice_that_the_service_is_killed(run: ScriptedRun, keys: dict[str, str]) -> None:
    begun = {version: run.begin(version, "steady.py", keys[version], str(STEPS)) for version in ONE}
    for k in range(STEPS):
        for process in begun.values():
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == f"{k}\n", run.log()
        if k == 1:
            run.kill()
        for process in begun.values():
            process.stdin.write("\n")
            process.stdin.flush()
        if k == 1:
            run.start()
    for version, process in begun.items():
        said = run.end(process)
        assert said["steps"] == [1.0, 2.0, 3.0, 4.0]
        wanted = [scored([1.0, float(k), 0.0, 1.0], k)[1] for k in range(STEPS)]
        assert said["losses"] == pytest.approx(wanted)
        adapter = f"{TENANTS[version]}-{said['model'].partition(':')[0]}-0"
        done = [
            operation.number for operation in run.trainer.carried_out if operation.adapter.rpartition(".")[0] == adapter
        ]
        assert done == list(range(1, 2 * STEPS + 1)), "no operation was carried out twice"


def samples_of(run: ScriptedRun, sampler: str, copy: Path) -> int:
    """Those that a restart would sample again. The service has its tables locked; a copy may be torn."""
    while True:
        for name in ("service.sqlite", "service.sqlite-wal"):
            shutil.copy(run.folder.path / name, copy / name)
        with suppress(sqlite3.DatabaseError), closing(sqlite3.connect(copy / "service.sqlite")) as db:
            [(n,)] = db.execute("SELECT COUNT(*) FROM samples WHERE sampler = ?", (sampler,)).fetchall()
            return int(n)


def test_a_sample_that_was_acknowledged_is_answered_after_a_kill(
    run: ScriptedRun, keys: dict[str, str], tmp_path: Path
) -> None:
    """In progress, or finished and not fetched; under the id that the client has, without asking again."""
    with httpx.Client(headers={"X-API-Key": keys[VERSIONS[0]]}, timeout=150.0) as http:

        def post(path: str, body: dict[str, Any]) -> httpx.Response:
            return http.post(f"{run.url}/api/v1/{path}", json=body)

        session = post("create_session", {"sdk_version": "0"}).json()["session_id"]
        opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny_model"}
        sampler = post("create_sampling_session", opened).raise_for_status().json()["sampling_session_id"]
        first = post("asample", sample_body(sampler, 0)).raise_for_status().json()["request_id"]
        wait_until(lambda: b"try_again" not in post("retrieve_future", {"request_id": first}).content)
        finished = post("asample", sample_body(sampler, 1)).raise_for_status().json()["request_id"]
        before = len(run.asked)
        run.answers.clear()
        try:
            ids = [post("asample", sample_body(sampler, k)).raise_for_status().json()["request_id"] for k in (2, 3)]
            wait_until(lambda: len(run.asked) >= before + len(ids))
            run.kill()
        finally:
            run.answers.set()
        run.start()
        for name in (finished, *ids):
            answer = post("retrieve_future", {"request_id": name})
            assert answer.headers["content-type"] == "application/x-protobuf", answer.text
            message = passes.SampleResponse()
            message.ParseFromString(answer.content)
            assert message.sequences[0].tokens == np.array([5, 6, 7], "<i4").tobytes()
        # Fetched a moment before the kill: it may have been sampled in vain.
        assert post("retrieve_future", {"request_id": first}).status_code in (200, 410)
        again = post("asample", sample_body(sampler, 3))
        assert again.json()["request_id"] == ids[1], "the same request"
        assert post("asample", sample_body(sampler, 3, num_samples=2)).status_code == 422, "another one"
        assert post("retrieve_future", {"request_id": f"{sampler}:99"}).status_code == 410
        wait_until(lambda: samples_of(run, sampler, tmp_path) == 0, what="what was fetched is dropped")
        asked = len(run.asked)
        run.kill()
        run.start()
        for name in (finished, *ids):
            assert post("retrieve_future", {"request_id": name}).status_code == 410
        assert len(run.asked) == asked, "nothing was sampled again"
