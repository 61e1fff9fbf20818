"""Keys and body limits in front of a server's routes, on a real HTTP server with TLS."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import create_connection, create_server

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_lora.engine.vllm_ext.server.guards import BearerAuth, guarded, write_client_files
from areal_lora.network import http_server
from areal_lora.network.http_server import BodyLimit, HttpServer
from areal_lora.network.tls import Plane, authorization, bearer_key, client_context, server_context
from areal_lora.rollout.completion_client import CompletionClient, CompletionRequest, FaultKind, GenerationFault
from areal_lora.rollout.routing import Router
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterRef
from tests.support.clocks import WAIT_S
from tests.support.paths import ROOT
from tests.support.rollout.fake_server import FakeServer
from tests.support.wiretap import Wiretap

SECRET, LIMIT = "5e" * 32, 1000
REF = AdapterRef(name="a", version=3)


class Echo:
    """Counts what reaches it and answers a completion whose text is in the request."""

    def __init__(self) -> None:
        self.reached = 0

    def app(self) -> Starlette:
        return Starlette(
            routes=[Route("/v1/completions", self.answer, methods=["POST"]), Route("/v1/models", self.answer)]
        )

    async def answer(self, request: Request) -> Response:
        body = await request.body()
        self.reached += 1
        try:
            prompt = json.loads(body)["prompt"]
        except ValueError:
            return Response(body)
        choice = {"index": 0, "finish_reason": "stop", "text": str(prompt), "versions": [3], "token_ids": [1]}
        return Response(msgspec.json.encode({"model": str(REF), "choices": [choice]}))


@contextmanager
def serving(app, tls) -> Iterator[int]:
    """A rollout server's HTTP server; its port."""
    with create_server(("127.0.0.1", 0)) as listener:
        server = HttpServer(app, listener, tls)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def echo() -> Iterator[tuple[Echo, int]]:
    inner = Echo()
    app = BearerAuth(BodyLimit(inner.app(), LIMIT), SECRET, Plane.DATA)
    with serving(app, server_context(SECRET, Plane.DATA, "127.0.0.1")) as port:
        yield inner, port


def ask(port: int, headers: dict[str, str], body=b"hello", **options) -> int:
    connection = http.client.HTTPSConnection(
        "127.0.0.1", port, timeout=WAIT_S, context=client_context(SECRET, Plane.DATA)
    )
    try:
        connection.request("POST", "/v1/completions", body, headers, **options)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    "key",
    ["", SECRET, bearer_key(SECRET, Plane.ADMIN), bearer_key("5f" * 32, Plane.DATA)],
    ids=["none", "the secret", "other plane", "other run"],
)
def test_a_wrong_key_is_401_before_the_body_is_looked_at(echo: tuple[Echo, int], key: str) -> None:
    before = echo[0].reached
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    assert ask(echo[1], headers) == 401
    assert ask(echo[1], headers | {"Content-Length": "1000000000000"}) == 401
    assert echo[0].reached == before


def test_bodies_up_to_the_limit_and_no_further(echo: tuple[Echo, int]) -> None:
    key = authorization(SECRET, Plane.DATA)
    assert ask(echo[1], key, b"x" * LIMIT) == 200
    before = echo[0].reached
    assert ask(echo[1], key, b"x" * (LIMIT + 1)) == 413
    assert ask(echo[1], key | {"Content-Length": "1000000000000"}) == 413
    assert ask(echo[1], key, iter([b"x" * 600] * 2), encode_chunked=True) == 413, "a body that announces no length"
    assert echo[0].reached == before


def test_clear_text_gets_no_answer(echo: tuple[Echo, int]) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n{key_line()}\r\n\r\nhi"
    with create_connection(("127.0.0.1", echo[1]), timeout=WAIT_S) as raw:
        raw.sendall(head.encode())
        answer = b""
        try:
            while part := raw.recv(4096):
                answer += part
        except ConnectionResetError:
            pass
    assert b"HTTP" not in answer


def key_line() -> str:
    return f"Authorization: {authorization(SECRET, Plane.DATA)['Authorization']}"


async def greedy(url: str, secret: str) -> str:
    router = Router()
    router.announce(REF, {"server-0": url})
    async with CompletionClient(router, secret) as client:
        request = CompletionRequest(prompt=[[123456, 7]], max_tokens=2, temperature=0.0, top_p=1.0)
        return (await client.pinned().complete(REF, request, timeout_s=WAIT_S))[1][0].text


def test_the_controllers_client_speaks_tls_and_a_recording_is_worth_nothing(echo: tuple[Echo, int]) -> None:
    with Wiretap(("127.0.0.1", echo[1])) as tap:
        assert asyncio.run(greedy(f"https://127.0.0.1:{tap.port}", SECRET)) == "[[123456, 7]]"
        for readable in (SECRET, bearer_key(SECRET, Plane.DATA), "Bearer", "123456", "/v1"):
            assert readable.encode() not in tap.everything, f"{readable} is in clear"
        before = echo[0].reached
        assert b"200" not in tap.replay()
        assert echo[0].reached == before, "a recorded request was carried out a second time"


def test_the_controllers_client_asks_no_server_of_another_run(echo: tuple[Echo, int]) -> None:
    before = echo[0].reached
    with pytest.raises(GenerationFault, match="certificate") as e:
        asyncio.run(greedy(f"https://127.0.0.1:{echo[1]}", "5f" * 32))
    assert e.value.kind is FaultKind.CONNECTION
    assert echo[0].reached == before


def test_an_open_data_plane_is_not_told_the_key() -> None:
    async def test() -> None:
        async with FakeServer(models={str(REF)}) as server:
            with Wiretap(("127.0.0.1", server.port)) as tap:
                await greedy(f"http://127.0.0.1:{tap.port}", SECRET)
                assert b"/v1/completions" in tap.everything, "in clear, on loopback"
                assert b"uthorization" not in tap.everything

    asyncio.run(test())


def test_a_stop_does_not_wait_for_idle_connections(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "CLOSE_S", 2 * int(WAIT_S))
    tls = server_context(SECRET, Plane.ADMIN, "127.0.0.1")
    with serving(Echo().app(), tls) as port:
        kept = http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=WAIT_S, context=client_context(SECRET, Plane.ADMIN)
        )
        kept.request("POST", "/v1/completions", b"hello")
        assert kept.getresponse().read() == b"hello"
    assert not caplog.records
    kept.close()


def documented(fence: str) -> str:
    """The only block of that kind in docs/en/cluster.md that is about a client outside the run."""
    text = (ROOT / "docs" / "en" / "cluster.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    [block] = [block for kind, block in blocks if kind == fence and "ca.pem" in block]
    return block.replace("runs/NAME/", "").replace("HOST", "localhost")


def test_outside_clients_do_as_the_documentation_says(tmp_path: Path) -> None:
    write_client_files(RunFolder(tmp_path), SECRET)
    app = guarded(Echo().app(), "0.0.0.0", SECRET)
    with serving(app, server_context(SECRET, Plane.DATA, "0.0.0.0")) as port:
        ask_models = "print(client.completions.create(model='a', prompt=[5, 6]).choices[0].text)"
        code = f"{documented('python').replace('PORT', str(port))}\n{ask_models}"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.stdout == "[5, 6]\n", done.stderr
        if shutil.which("curl") is None:
            pytest.skip("there is no curl here")
        command = documented("bash").strip().replace("PORT", str(port)) + " --fail --silent --show-error"
        done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        without = command.replace("Bearer $(cat data.key)", "Bearer 0")
        done = subprocess.run(without, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert "401" in done.stderr


@pytest.mark.parametrize(("bind", "status"), [("127.0.0.1", 200), ("0.0.0.0", 401)])
def test_the_data_plane_is_open_on_loopback_only(bind: str, status: int) -> None:
    with serving(guarded(Echo().app(), bind, SECRET), None) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        connection.request("POST", "/v1/completions", b"hello")
        assert connection.getresponse().status == status
        connection.close()
