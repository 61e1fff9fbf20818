"""Rank 0's connections to the rollout servers: requests to all servers at once, answers one by one."""

import contextlib
import http.client
import ssl
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

import msgspec

from areal_lora.errors import ArealLoraError, ManifestError, PublishError
from areal_lora.network.tls import Plane, authorization, client_context
from areal_lora.processes.log import get_logger
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync import messages
from areal_lora.weight_sync.layout import AdapterLayout, Payload
from areal_lora.weight_sync.link.relays import RelayGroup
from areal_lora.weight_sync.manifest import Announcement, encode
from areal_lora.weight_sync.messages import PingReply, PublishReply, ServerEndpoint
from areal_lora.weight_sync.probe import ProbeExpectation, ProbeResult, check_probe

log = get_logger(__name__)

PINGS = 128  # at once; a hundred servers answer in the time of one, and their threads and sockets stay bounded

M = TypeVar("M")


class AdminClient:
    """Blocking client of one server's admin plane over one persistent connection, one call at a time.

    Thread-safe. ``ping`` uses a connection of its own: it never waits for another call.
    All methods raise PublishError if the server fails or ``timeout_s`` passes.
    """

    def __init__(self, server: ServerEndpoint, secret: str) -> None:
        self.server, self._secret = server, secret
        self._headers = authorization(secret, Plane.ADMIN) | {"Content-Type": messages.CONTENT_TYPE}
        tls = client_context(secret, Plane.ADMIN)
        self._connection = http.client.HTTPSConnection(server.host, server.admin_port, context=tls)
        self._one_call = threading.Lock()

    def info(self, timeout_s: float) -> messages.InfoReply:
        return self.call(messages.INFO_PATH, None, messages.InfoReply, timeout_s)

    def modules(self, timeout_s: float) -> messages.ModulesReply:
        return self.call(messages.MODULES_PATH, None, messages.ModulesReply, timeout_s)

    def join(self, request: messages.JoinRequest, timeout_s: float) -> messages.JoinReply:
        return self.call(messages.JOIN_PATH, request, messages.JoinReply, timeout_s)

    def publish(self, announcement: bytes, timeout_s: float) -> PublishReply:
        """Raises ManifestError if the server refuses, PublishError if it fails."""
        return self.call(messages.PUBLISH_PATH, announcement, PublishReply, timeout_s)

    def drop(self, name: str, timeout_s: float) -> messages.DropReply:
        """Have the server forget adapter ``name``; idempotent."""
        return self.call(messages.DROP_PATH, messages.DropRequest(name=name), messages.DropReply, timeout_s)

    def score(
        self, model: str | None, token_ids: list[list[int]], timeout_s: float, temperature: float = 1.0
    ) -> list[list[float]]:
        request = messages.ScoreRequest(model=model, token_ids=token_ids, temperature=temperature)
        return self.call(messages.SCORE_PATH, request, messages.ScoreReply, timeout_s).logprobs

    def ping(self, timeout_s: float = messages.PING_S) -> PingReply:
        """Raises PublishError if the server or one of its workers does not answer (dead, hung or stopped)."""
        return self._aside(messages.PING_PATH, None, timeout_s)

    def ping_again(self, timeout_s: float) -> PingReply:
        """``ping`` over the persistent connection, of a client that makes no other calls."""
        return self.call(messages.PING_PATH, None, PingReply, timeout_s)

    def dismiss(self, timeout_s: float) -> None:
        """Release a leaving server: it is no member any more, and no request is routed to it."""
        self._aside(messages.DISMISS_PATH, b"", timeout_s)

    def close(self) -> None:
        with self._one_call:
            self._connection.close()

    def call(self, path: str, body: messages.AdminMessage | bytes | None, kind: type[M], timeout_s: float) -> M:
        """Send a request, a GET if it has no ``body``; ``kind``: message of a 200. Raises ManifestError for a 409."""
        method = "GET" if body is None else "POST"
        content = msgspec.msgpack.encode(body) if isinstance(body, messages.AdminMessage) else body
        with self._one_call:
            try:
                status, answer = self._exchange(method, path, content, timeout_s)
            except ssl.SSLCertVerificationError as e:
                self._connection.close()
                raise PublishError(
                    f"server {self.server} is not of this run: its certificate comes from another run secret "
                    "(fix: start trainer and servers with the same run folder)"
                ) from e
            except (OSError, http.client.HTTPException) as e:
                self._connection.close()
                raise PublishError(
                    f"{method} {path} of server {self.server} failed within {timeout_s:.1f} s: {e!r}; "
                    "see the server's log"
                ) from e
        try:
            if status == http.client.CONFLICT:
                refusal = msgspec.msgpack.decode(answer, type=messages.RefusalReply)
                raise ManifestError(refusal.reason, f"server {self.server}: {refusal.detail}")
            if status == http.client.OK:
                return msgspec.msgpack.decode(answer, type=kind)
        except msgspec.MsgspecError as e:
            raise PublishError(f"{method} {path} of server {self.server}: malformed answer: {e}") from e
        text = answer[:300].decode("utf-8", "replace")
        raise PublishError(f"{method} {path} of server {self.server} answered {status}: {text}; see the server's log")

    def _aside(self, path: str, body: bytes | None, timeout_s: float) -> PingReply:
        """``call`` over a connection of its own."""
        with contextlib.closing(AdminClient(self.server, self._secret)) as own:
            return own.call(path, body, PingReply, timeout_s)

    def _exchange(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        """Return (status, body). ``timeout_s`` bounds connecting and every read; an admin answer is a single read."""
        connection = self._connection
        reused = connection.sock is not None
        connection.timeout = timeout_s
        if reused:
            connection.sock.settimeout(timeout_s)
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
            connection.close()
            if not reused:
                raise
            # Servers close idle connections. Every request is idempotent.
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
        return response.status, response.read()


T = TypeVar("T")
Answers = dict[ServerEndpoint, T | ArealLoraError]


class _Line:
    """A persistent connection to one server, one for pings, and the thread that waits for the server's answers."""

    def __init__(self, server: ServerEndpoint, secret: str) -> None:
        self.client, self.pings = AdminClient(server, secret), AdminClient(server, secret)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"admin-{server.name}")
        self.layouts: set[str] = set()  # sent since the last join
        self.checked: set[str] = set()
        self.base_logprobs: dict[str, list[list[float]] | None] = {}  # None: the server has no base any more
        self.served_logprobs: dict[str, dict[AdapterRef, list[list[float]]]] = {}  # by probe, of the newest versions
        self.undropped: set[str] = set()  # adapters that the server has not been able to drop

    def score_base(self, probe: ProbeExpectation, timeout_s: float) -> list[list[float]] | None:
        """The base's scores of ``probe``, once per server; None if it serves none. Raises PublishError."""
        key = repr(probe.token_ids)
        if key not in self.base_logprobs:
            self.base_logprobs[key] = self.client.score(None, probe.token_ids, timeout_s) or None
        return self.base_logprobs[key]

    def drop(self, timeout_s: float) -> None:
        """Have the server drop what it has not dropped. In the line's thread only, where a probe may be in progress."""
        for name in sorted(self.undropped):
            for known in self.served_logprobs.values():
                for ref in [ref for ref in known if ref.name == name]:
                    del known[ref]
            try:
                self.client.drop(name, timeout_s)
            except (PublishError, ManifestError) as e:
                log.warning("%s; adapter %s is dropped there before the next version", e, name)
            else:
                self.undropped.discard(name)

    def join(self, request: messages.JoinRequest, deadline: float, answer_s: float) -> messages.JoinReply:
        left_s = self._time_to_send(deadline)
        return self.client.join(msgspec.structs.replace(request, timeout_s=left_s), left_s + answer_s)

    def publish(self, announcement: Announcement[msgspec.Raw], deadline: float, answer_s: float) -> PublishReply:
        self.drop(_left_s(deadline))
        left_s = self._time_to_send(deadline)
        return self.client.publish(encode(msgspec.structs.replace(announcement, timeout_s=left_s)), left_s + answer_s)

    def _time_to_send(self, deadline: float) -> float:
        """Remaining seconds when a queued request is sent. Raises PublishError if none remain."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise PublishError(f"server {self.client.server} was sent no request: the previous one took all the time")
        return left_s

    def close(self) -> None:
        """Close without waiting for the request in progress; queued requests have expired, or are quick."""
        self.thread.submit(self.client.close)
        self.thread.submit(self.pings.close)
        self.thread.shutdown(wait=False)


class Fleet:
    """Lines to all members. A server that leaves and returns gets a new line, and drops what was dropped meanwhile."""

    def __init__(self, run: str, secret: str) -> None:
        self._run, self._secret = run, secret
        self._lines: dict[ServerEndpoint, _Line] = {}
        self._away: dict[ServerEndpoint, set[str]] = {}  # adapters that former members, which may return, have to drop

    def keep(self, members: Iterable[ServerEndpoint]) -> None:
        """Open and close lines so that exactly ``members`` have one."""
        wanted = set(members)
        for server in self._lines.keys() - wanted:
            self._away[server] = self._lines[server].undropped
            self._lines.pop(server).close()
        for server in wanted - self._lines.keys():
            line = self._lines[server] = _Line(server, self._secret)
            line.undropped |= self._away.get(server, set())
            # An earlier session of the server does not return.
            self._away = {other: names for other, names in self._away.items() if other.name != server.name}

    def close(self) -> None:
        self.keep(())

    def ping(self, server: ServerEndpoint, timeout_s: float) -> PingReply:
        """Raises PublishError if ``server``, a member or not, does not answer in time."""
        return AdminClient(server, self._secret).ping(timeout_s)

    def ping_again(self, server: ServerEndpoint, timeout_s: float) -> PingReply:
        """``ping``, of a member over a connection that is kept: 512 TLS handshakes a second would fill a core."""
        line = self._lines.get(server)
        return self.ping(server, timeout_s) if line is None else line.pings.ping_again(timeout_s)

    def dismiss(self, servers: Sequence[ServerEndpoint], timeout_s: float) -> None:
        """Release leaving servers. Does not wait for their answers: one that misses this ends later."""
        pool = ThreadPoolExecutor(PINGS, thread_name_prefix="dismiss")
        for server in servers:
            pool.submit(AdminClient(server, self._secret).dismiss, timeout_s)
        pool.shutdown(wait=False)

    def silent(self, servers: Sequence[ServerEndpoint], timeout_s: float) -> dict[ServerEndpoint, ArealLoraError]:
        """Ping all ``servers``, ``PINGS`` at once; return those that do not answer in ``timeout_s``, with their errors.

        One without an answer after half of the time is repeated beside the first, on a connection of its own: a link
        that loses a packet in a hundred does not make a server silent.
        """
        silent: dict[ServerEndpoint, ArealLoraError] = {}
        for start in range(0, len(servers), PINGS):
            silent |= self._silent(servers[start : start + PINGS], timeout_s)
        return silent

    def _silent(self, servers: Sequence[ServerEndpoint], timeout_s: float) -> dict[ServerEndpoint, ArealLoraError]:
        pool = ThreadPoolExecutor(2 * len(servers), thread_name_prefix="ping")
        until = time.monotonic() + timeout_s
        first = {server: pool.submit(self.ping_again, server, timeout_s) for server in servers}
        wait(first.values(), timeout_s / 2)
        second = {s: pool.submit(self.ping, s, timeout_s / 2) for s, ping in first.items() if not ping.done()}
        pool.shutdown(wait=False)  # a ping that connects late and answers late takes longer than ``timeout_s``
        open_ = [ping for s in second for ping in (first[s], second[s])]
        while open_ and time.monotonic() < until:
            wait(open_, max(0.0, until - time.monotonic()), FIRST_COMPLETED)
            unanswered = [s for s in second if not _answered(first[s], second[s])]
            open_ = [ping for s in unanswered for ping in (first[s], second[s]) if not ping.done()]
        silent = {s: ping for s, ping in first.items() if s not in second or not _answered(ping, second[s])}
        return errors(answers(silent, until))

    def drop(self, members: Sequence[ServerEndpoint], name: str, timeout_s: float) -> None:
        """Have ``members`` drop adapter ``name`` after their requests in progress. Does not wait for their answers.

        A server that fails, or that returns later, drops it before its next version. Any thread; a server may cease to
        be a member.
        """
        for names in list(self._away.values()):
            names.add(name)
        for line in [line for server in members if (line := self._lines.get(server)) is not None]:
            line.undropped.add(name)
            with contextlib.suppress(RuntimeError):  # the publisher thread has closed the line: it is no member now
                line.thread.submit(line.drop, timeout_s)

    def checked(self, members: Sequence[ServerEndpoint], layout: AdapterLayout) -> bool:
        """Whether all members passed ``check`` for ``layout``."""
        return all(layout.digest in self._lines[server].checked for server in members)

    def check(
        self, members: Sequence[ServerEndpoint], layout: AdapterLayout, probe: ProbeExpectation | None, timeout_s: float
    ) -> dict[ServerEndpoint, Future[None]]:
        """Check that members can serve ``layout``. Futures raise AdapterError, or PublishError for a dead server.

        Where versions are merged into the base, the base's scores of ``probe`` are taken now: later there is none.
        """

        def check(line: _Line) -> None:
            if layout.digest not in line.checked:
                messages.check_served(layout, line.client.modules(timeout_s))
                if probe is not None and layout.payload is Payload.MERGED:
                    line.score_base(probe, timeout_s)
                line.checked.add(layout.digest)

        return {server: self._lines[server].thread.submit(check, self._lines[server]) for server in members}

    def join(
        self,
        groups: Sequence[RelayGroup],
        sources: Sequence[list[messages.SourceEndpoint]],
        deadline: float,
        answer_s: float,
    ) -> dict[ServerEndpoint, Future[messages.JoinReply]]:
        """Request that servers join their groups by ``deadline``, of which ``sources`` are the endpoints."""
        above = dict[ServerEndpoint, list[messages.SourceEndpoint]]()
        below = dict[ServerEndpoint, list[messages.SourceEndpoint]]()
        ranks = dict[ServerEndpoint, list[int]]()
        for group, endpoints in zip(groups, sources, strict=True):
            first = 1
            for server in group.members:
                above[server], ranks[server] = endpoints, list(range(first, first + server.workers))
                first += server.workers
            if group.relay is not None:
                below[group.relay] = endpoints
        posts = {}
        for server in above | below:
            line = self._lines[server]
            line.layouts.clear()
            request = messages.JoinRequest(
                run=self._run,
                endpoints=above.get(server),
                ranks=ranks.get(server, [0] * server.workers),
                timeout_s=0.0,
                below=below.get(server),
            )
            posts[server] = line.thread.submit(line.join, request, deadline, answer_s)
        return posts

    def publish(
        self,
        members: Sequence[ServerEndpoint],
        manifest: ShardManifest,
        layout: AdapterLayout,
        deadline: float,
        answer_s: float,
    ) -> dict[ServerEndpoint, Future[PublishReply]]:
        """Announce a version to all members; the layout is included if it was not sent since the join.

        The transfer has to end by ``deadline``; answers arrive up to ``answer_s`` later.
        """
        known, new = msgspec.Raw(msgspec.msgpack.encode(None)), msgspec.Raw(layout.encoded)
        posts = {}
        for server in members:
            line = self._lines[server]
            brings = known if manifest.layout in line.layouts else new
            announcement = Announcement(manifest=manifest, layout=brings, timeout_s=0.0)
            line.layouts.add(manifest.layout)
            posts[server] = line.thread.submit(line.publish, announcement, deadline, answer_s)
        return posts

    def probe(
        self,
        members: Sequence[ServerEndpoint],
        ref: AdapterRef,
        expected: ProbeExpectation,
        tolerance: float,
        deadline: float,
    ) -> dict[ServerEndpoint, Future[ProbeResult]]:
        """Score the probe on all members at once. The futures raise ParityError, or PublishError if a server fails."""

        def score(server: ServerEndpoint) -> ProbeResult:
            line = self._lines[server]
            base = line.score_base(expected, _left_s(deadline))
            served = line.client.score(str(ref), expected.token_ids, _left_s(deadline))
            known = line.served_logprobs.setdefault(repr(expected.token_ids), {})
            before = None if expected.parent is None else known.get(expected.parent)
            known[ref] = served
            for old in sorted((r for r in known if r.name == ref.name), key=lambda r: r.version)[:-2]:
                del known[old]
            found = check_probe(ref, str(server), expected, served, base, tolerance, before)
            if found.mean_abs > tolerance:
                log.warning(
                    "%s on %s: a probe sequence differs by up to %.2g nats, the others do not: a tie between experts",
                    ref,
                    server,
                    found.max_abs,
                )
            return found

        return {server: self._lines[server].thread.submit(score, server) for server in members}


def _answered(*pings: Future[PingReply]) -> bool:
    return any(ping.done() and ping.exception() is None for ping in pings)


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.01)


def answers(posts: Mapping[ServerEndpoint, Future[T]], until: float) -> Answers[T]:
    """Answer or error of every server; PublishError for an answer missing at ``until`` (time.monotonic)."""
    got: Answers[T] = {}
    for server, post in posts.items():
        try:
            got[server] = post.result(max(until - time.monotonic(), 0.0))
        except TimeoutError:
            got[server] = PublishError(f"server {server} did not answer in time; see the server's log")
        except ArealLoraError as e:
            got[server] = e
    return got


def errors(got: Answers[T]) -> dict[ServerEndpoint, ArealLoraError]:
    return {server: answer for server, answer in got.items() if isinstance(answer, ArealLoraError)}
