from __future__ import annotations

import http.client
import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from areal_lora.errors import ManifestError, PublishError, RefusalReason
from areal_lora.network.tls import Plane, authorization, bearer_key, client_context, server_context
from areal_lora.weight_sync import messages as tp
from areal_lora.weight_sync.admin_client import AdminClient
from tests.support.clocks import wait_until
from tests.support.weight_sync.helpers import BASE, RUN, SECRET, shapes_of
from tests.support.weight_sync.memory_server import MemoryServer
from tests.support.wiretap import Wiretap


def endpoint_of(listener):
    port = listener.getsockname()[1]
    return tp.ServerEndpoint(name="server-7", host="127.0.0.1", admin_port=port, data_port=1, workers=1)


def tls_listener():
    """Its connections speak this run's TLS, and what the test writes."""
    tls = server_context(SECRET, Plane.ADMIN, "127.0.0.1")
    return tls.wrap_socket(socket.create_server(("127.0.0.1", 0)), server_side=True)


@pytest.fixture(scope="module")
def server():
    def score(model, ids):
        return [[0.0] + [-0.5] * (len(row) - 1) for row in ids]

    with MemoryServer(run=RUN, secret=SECRET, base_digest=BASE, shapes=shapes_of, score=score) as s:
        yield s


def test_info_and_score(server):
    client = AdminClient(server.endpoint, SECRET)
    info = client.info(120.0)
    assert (info.run, info.base_digest, info.workers, info.refs) == (RUN, BASE, 1, [])
    assert client.score(None, [[1, 2, 3]], 120.0) == [[0.0, -0.5, -0.5]]


def test_an_adapter_that_is_not_there_is_not_answered_by_the_base(server):
    with pytest.raises(PublishError, match="no adapter 'a@v3'"):
        AdminClient(server.endpoint, SECRET).score("a@v3", [[1, 2]], 120.0)


@pytest.mark.parametrize("secret", ["", "wrong", SECRET[:-1], SECRET + "0"])
def test_another_runs_secret_is_one_clear_error_at_once(server, secret):
    with pytest.raises(PublishError, match="not of this run") as e:
        AdminClient(server.endpoint, secret).info(120.0)
    assert SECRET not in str(e.value)


def ask(server, path, headers, method="GET", body=None):
    """The answer to a client of this run's TLS that shows what it likes."""
    tls = client_context(SECRET, Plane.ADMIN)
    connection = http.client.HTTPSConnection("127.0.0.1", server.endpoint.admin_port, timeout=120, context=tls)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("key", ["", SECRET, bearer_key(SECRET, Plane.DATA), bearer_key("a" * 64, Plane.ADMIN)])
def test_a_wrong_key_is_turned_away_and_so_is_the_secret_itself(server, key):
    status, answer = ask(server, tp.INFO_PATH, {"Authorization": f"Bearer {key}"} if key else {})
    assert status == 401
    assert RUN.encode() not in answer


def test_a_body_beyond_the_limit_is_not_read(server):
    headers = authorization(SECRET, Plane.ADMIN) | {"Content-Length": str(tp.MAX_BODY_BYTES + 1)}
    assert ask(server, tp.SCORE_PATH, headers, "POST")[0] == 413


def test_a_manifest_that_cannot_be_read_is_a_refusal(server):
    with pytest.raises(ManifestError) as e:
        AdminClient(server.endpoint, SECRET).publish(b"nonsense", 120.0)
    assert e.value.reason == RefusalReason.MALFORMED


def test_a_server_that_is_not_there_and_one_that_is_silent_are_errors_in_time():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        endpoint = endpoint_of(s)
        with pytest.raises(PublishError, match=r"server-7 \(127"):
            AdminClient(endpoint, SECRET).info(1.0)
        s.listen()
        with pytest.raises(PublishError, match=r"within 0\.5 s"):
            AdminClient(endpoint, SECRET).info(0.5)


def test_an_answer_that_is_no_message_is_an_error():
    def answer(listener):
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")

    with tls_listener() as s:
        thread = threading.Thread(target=answer, args=(s,))
        thread.start()
        endpoint = endpoint_of(s)
        with pytest.raises(PublishError, match="malformed"):
            AdminClient(endpoint, SECRET).info(120.0)
        thread.join()


def test_unknown_routes_are_not_found(server):
    assert ask(server, "/admin/elsewhere", authorization(SECRET, Plane.ADMIN))[0] == 404


def answering(listener, seen, stop):
    """A server that counts connections and closes each after two answers, as one does that is idle."""
    body = msgspec.msgpack.encode(tp.PingReply())
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    while not stop.is_set():
        connection, _ = listener.accept()
        seen.append(0)
        with connection:
            for _ in range(2):
                if not connection.recv(65536):
                    break
                seen[-1] += 1
                connection.sendall(head + body)


def test_a_connection_is_kept_and_one_the_server_closed_is_made_anew():
    seen, stop = [], threading.Event()
    with tls_listener() as listener:
        threading.Thread(target=answering, args=(listener, seen, stop), daemon=True).start()
        client = AdminClient(endpoint_of(listener), SECRET)
        for n in range(5):
            client.call(tp.PING_PATH, None, tp.PingReply, 120.0)
            if n % 2:
                assert select.select([client._connection.sock], [], [], 120.0)[0], "the server's end of connection"
        assert seen == [2, 2, 1]
        stop.set()
        client.close()


def test_a_ping_does_not_wait_for_another_call():
    arrived, go_on = threading.Event(), threading.Event()

    def score(model, ids):
        arrived.set()
        assert go_on.wait(120.0)
        return [[0.0] * len(row) for row in ids]

    with MemoryServer(run=RUN, secret=SECRET, base_digest=BASE, shapes=shapes_of, score=score) as s:
        client = AdminClient(s.endpoint, SECRET)
        busy = threading.Thread(target=client.score, args=(None, [[1, 2]], 120.0))
        busy.start()
        assert arrived.wait(120.0)
        assert AdminClient(s.endpoint, SECRET).ping(120.0) == tp.PingReply()
        go_on.set()
        busy.join()


def test_what_was_given_up_while_the_server_was_busy_is_not_done_late():
    """Or a server would always be busy with what the trainer has given up, and never in time for what it wants."""
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        MemoryServer(run=RUN, secret=SECRET, base_digest=BASE, shapes=shapes_of) as s,
    ):
        client = AdminClient(s.endpoint, SECRET)
        source = tp.SourceEndpoint(
            source=0, host="127.0.0.1", port=mute.getsockname()[1], world=2, token="t", bucket_bytes=1, backend="gloo"
        )

        def join(timeout_s):
            request = tp.JoinRequest(run=RUN, endpoints=[source], ranks=[1], timeout_s=timeout_s)
            return AdminClient(s.endpoint, SECRET).join(request, 150.0)

        with ThreadPoolExecutor(1) as pool:
            busy = pool.submit(join, 120.0)
            wait_until(s._one_publish.locked)
            with pytest.raises(PublishError, match="late by now"):
                join(0.5)
            assert not busy.done()
            connection, _ = mute.accept()
            connection.close()
            mute.close()
            with pytest.raises(PublishError, match="cannot be reached"):
                busy.result()
        with pytest.raises(PublishError, match="cannot be reached"):
            join(120.0)  # its turn comes at once
        assert client.ping(120.0) == tp.PingReply()


def test_what_crosses_the_network_holds_no_secret_and_does_nothing_when_it_is_sent_again():
    dismissals = []
    with (
        MemoryServer(
            run=RUN, secret=SECRET, base_digest=BASE, shapes=shapes_of, on_dismiss=lambda: dismissals.append(1)
        ) as s,
        Wiretap(("127.0.0.1", s.endpoint.admin_port)) as tap,
    ):
        client = AdminClient(msgspec.structs.replace(s.endpoint, admin_port=tap.port), SECRET)
        assert client.info(120.0).run == RUN
        client.call(tp.DISMISS_PATH, b"", tp.PingReply, 120.0)
        assert dismissals == [1]
        assert SECRET.encode() not in tap.everything
        for readable in (b"Bearer", b"/admin/", BASE.encode()):
            assert readable not in tap.everything, f"{readable!r} is in clear"
        answer = tap.replay()
        assert b"200" not in answer
        assert dismissals == [1], "a recorded request was carried out a second time"
        client.close()
