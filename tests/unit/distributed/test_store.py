"""The keyed store against torch's own, through the C++ wrapper that process groups use."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from areal_lora.distributed.store import ENDED, Await, CurveStore, KeyTable, StoreCall, StoreServer
from areal_lora.network.rpc import zmq_curve_keys
from tests.support.clocks import WAIT_S, wait_until
from tests.support.weight_sync.helpers import SECRET

OTHER = "00" * 32


@pytest.fixture
def server():
    server = StoreServer("127.0.0.1", SECRET)
    yield server
    server.close()


@contextmanager
def client(server, timeout_s=WAIT_S, secret=SECRET):
    store = CurveStore(server.host, server.port, secret, timeout_s)
    yield store
    store.close()


def script(store):
    """What a store answers to a course of all operations; errors by their kind."""

    def run(method, *arguments):
        try:
            return getattr(store, method)(*arguments)
        except (dist.DistError, RuntimeError) as error:
            return type(error).__name__

    return [
        run("set", "k", "v"),
        run("get", "k"),
        run("set", "k", b"\x00\xff"),
        run("get", "k"),
        run("add", "n", 3),
        run("add", "n", -5),
        run("get", "n"),
        run("check", ["k", "n"]),
        run("check", ["k", "z"]),
        run("compare_set", "c", "", "first"),
        run("compare_set", "c", "other", "second"),
        run("compare_set", "c", "first", "second"),
        run("get", "c"),
        run("compare_set", "none", "old", "new"),
        run("set", "a", "xyz"),
        run("set", "p", "1"),
        run("set", "q", "2"),
        run("wait", ["a", "q"]),
        run("wait", ["z"], timedelta(seconds=0.05)),
        run("delete_key", "p"),
        run("delete_key", "p"),
        run("multi_get", ["a", "k", "q"]),
        run("has_extended_api"),
        run("set_timeout", timedelta(seconds=0.05)),
        run("get", "z"),
        run("multi_get", ["a", "z"]),
    ]


def test_it_answers_as_torchs_own(server):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        own = dist.TCPStore(
            "127.0.0.1",
            port,
            1,
            True,
            timedelta(seconds=WAIT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    with client(server) as store:
        assert script(dist.PrefixStore("x", store)) == script(dist.PrefixStore("x", own))
        assert store.num_keys() == 5  # k, n, c, a, q
        assert dist.PrefixStore("y", store).clone().num_keys() == 5


@pytest.mark.parametrize("size", [3, 9])
def test_requests_of_a_gloo_group_grow_with_its_ranks(server, monkeypatch, size):
    """Not with their pairs: a large group would form slowly."""
    requests, handle = [], KeyTable.handle
    monkeypatch.setattr(
        KeyTable, "handle", lambda table, sender, request: (requests.append(request), handle(table, sender, request))
    )

    def join(rank):
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._threads = timedelta(seconds=WAIT_S), 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        with client(server) as store:
            group = dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, size, options)
            group.broadcast([mine := torch.tensor([rank])]).wait()
            return int(mine)

    with ThreadPoolExecutor(size) as threads:
        assert list(threads.map(join, range(size))) == [0] * size
    requests = [each for each in requests if each != StoreCall("num_keys")]  # of the constructors
    assert len(requests) <= 2 * size


class CountedStore(dist.HashStore):
    """Counts the keys that are looked for."""

    looked_for = 0

    def check(self, keys):
        self.looked_for += len(keys)
        return super().check(keys)


def test_waits_of_all_ranks_for_all_keys_cost_the_square_of_their_number():
    replies, ranks = [], 64
    table = KeyTable(lambda _, reply: replies.append(reply))
    table._values = CountedStore()
    keys = [f"rank {rank}" for rank in range(ranks)]
    for _ in keys:
        table.handle([b""], Await(keys, fetch=True))
    for key in keys:
        table.handle([b""], StoreCall("set", (key, key)))
    assert [reply.result for reply in replies if reply.result] == [[key.encode() for key in keys]] * ranks
    assert table._values.looked_for < 8 * ranks**2, "not their cube: 256 workers were three seconds"


def test_a_key_that_is_deleted_during_a_wait_is_waited_for_again():
    replies = []
    table = KeyTable(lambda sender, reply: replies.append((sender, reply.result)))
    wait = Await(["a", "b"], fetch=True)
    for request in (StoreCall("set", ("a", "1")), wait, StoreCall("delete_key", ("a",)), StoreCall("set", ("b", "2"))):
        table.handle([b"waits" if request is wait else b""], request)
    assert [b"waits"] not in [sender for sender, _ in replies]
    table.handle([b""], StoreCall("set", ("a", "3")))
    assert ([b"waits"], [b"3", b"2"]) in replies


def test_the_end_fails_waits_for_missing_keys_alone(server):
    with client(server) as store, ThreadPoolExecutor(2) as pool:
        store.set("there", "1")
        waits = [pool.submit(wait, ["there", "missing"]) for wait in (store.wait, store.multi_get)]
        store.set(ENDED, "server-3 has died")
        for wait in waits:
            with pytest.raises(dist.DistStoreError, match="server-3 has died"):
                wait.result(WAIT_S)
        with pytest.raises(dist.DistStoreError, match="server-3 has died"):
            store.get("missing")
        assert store.get("there") == b"1"


def test_waits_of_several_threads_do_not_hold_each_other_up(server):
    with client(server) as store, ThreadPoolExecutor(8) as pool:
        waits = [pool.submit(dist.PrefixStore("x", store).get, str(i)) for i in range(8)]
        time.sleep(0.1)
        for i in reversed(range(8)):
            store.set(f"x/{i}", str(i))
        assert [w.result(WAIT_S) for w in waits] == [str(i).encode() for i in range(8)]


def test_a_server_that_ends_wakes_who_waits(server):
    def end():
        wait_until(lambda: server._table._waiting)
        server.close()

    with client(server, timeout_s=2 * WAIT_S) as store:
        threading.Thread(target=end).start()
        with pytest.raises(dist.DistNetworkError, match="closed"):
            dist.PrefixStore("x", store).get("never")
        with pytest.raises(dist.DistNetworkError, match="refused"):
            store.set("k", "v")


def test_a_connection_that_was_lost_while_idle_is_made_again(server):
    """As a firewall does with connections that are silent for hours."""
    with client(server) as store:
        store.set("k", "v")
        (idle,) = store._idle
        at = psutil.Process().net_connections("tcp")
        (end,) = {c.fd for c in at if c.raddr == (server.host, server.port) and c.status == psutil.CONN_ESTABLISHED}
        with socket.socket(fileno=os.dup(end)) as held:
            held.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: not idle.usable())
        assert store.get("k") == b"v"


def test_a_wait_ends_in_its_time_and_the_store_goes_on(server):
    with client(server) as store:
        began = time.monotonic()
        with pytest.raises(dist.DistStoreError, match=r"wait timeout after 0.2 s, keys: x/never"):
            dist.PrefixStore("x", store).wait(["never"], timedelta(seconds=0.2))
        assert time.monotonic() - began >= 0.2
        store.set("x/never", "late")
        assert store.get("x/never") == b"late"


def test_another_secret_is_refused_at_once(server):
    with pytest.raises(dist.DistNetworkError, match="another run"):  # after its time it would be a DistStoreError
        CurveStore(server.host, server.port, OTHER, WAIT_S)


def test_the_servers_public_key_is_not_enough(server, monkeypatch):
    """A client that knows it, but has a key pair of its own."""

    def half(secret, role):
        return zmq_curve_keys(SECRET if role == "torch-store" else OTHER, role)

    monkeypatch.setattr("areal_lora.network.rpc.zmq_curve_keys", half)
    with pytest.raises(dist.DistNetworkError):
        CurveStore(server.host, server.port, SECRET, 2.0)


def test_bytes_that_are_no_handshake_do_no_harm(server):
    for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40):
        with socket.create_connection((server.host, server.port), WAIT_S) as stranger, suppress(OSError):
            stranger.sendall(junk)
    with client(server) as store:
        store.set("k", "v")
        assert store.get("k") == b"v"


def test_it_listens_on_the_given_address_only():
    before = {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    server = StoreServer("127.0.0.2", SECRET)
    after = {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert after - before == {("127.0.0.2", server.port)}
    server.close()
    assert {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN} <= before


def test_it_works_over_ipv6():
    server = StoreServer("::1", SECRET)
    with client(server) as store:
        assert store.add("n", 2) == 2
    server.close()


def test_nothing_is_left_after_closing(server):
    """Threads and descriptors: a trainer reconnects for every change of the servers."""
    process = psutil.Process()

    def held():
        return process.num_fds(), process.num_threads()

    for turn in range(6):
        with client(server) as store:
            store.set("k", str(turn))
        if turn == 0:
            first = held()
    # Native threads end a moment later.
    wait_until(lambda: all(now <= then for now, then in zip(held(), first, strict=True)))
