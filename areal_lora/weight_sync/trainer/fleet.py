"""Rank 0's connections to the rollout servers: requests to all servers at once, answers one by one."""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import chain
from typing import TypeVar

import msgspec

from areal_lora.errors import AdapterError, ArealLoraError, ManifestError, PublishError
from areal_lora.processes.log import get_logger
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync import messages
from areal_lora.weight_sync.admin_client import AdminClient, answered
from areal_lora.weight_sync.layout import AdapterLayout, Payload
from areal_lora.weight_sync.link.broadcast_groups import end_formation
from areal_lora.weight_sync.link.relays import RelayGroup
from areal_lora.weight_sync.manifest import Announcement, encode
from areal_lora.weight_sync.messages import PingReply, PublishReply, ServerEndpoint
from areal_lora.weight_sync.probe import ProbeExpectation, ProbeResult, check_probe

log = get_logger(__name__)

EARLIER = 0.95  # of the time for an answer: a relay then answers for the others, if one of its servers does not
PINGS = 128  # at once; a hundred servers answer in the time of one, and their threads and sockets stay bounded

T = TypeVar("T")
Answers = dict[ServerEndpoint, T | ArealLoraError]


class _Line:
    """A persistent connection to one server, one for pings, and the thread that waits for the server's answers."""

    def __init__(self, server: ServerEndpoint, secret: str) -> None:
        self.client, self.pings = AdminClient(server, secret), AdminClient(server, secret)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"admin-{server.name}")
        # For the servers below it, beside its own requests.
        self.relay, self.relaying = AdminClient(server, secret), ThreadPoolExecutor(1, thread_name_prefix="relay")
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
        left_s = self.time_to_send(deadline)
        return self.client.join(msgspec.structs.replace(request, timeout_s=left_s), left_s + answer_s)

    def publish(self, announcement: Callable[[float], bytes], deadline: float, answer_s: float) -> PublishReply:
        self.drop(_left_s(deadline))
        left_s = self.time_to_send(deadline)
        return self.client.publish(announcement(left_s), left_s + answer_s)

    def time_to_send(self, deadline: float) -> float:
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
        self.relaying.submit(self.relay.close)
        self.relaying.shutdown(wait=False)


class Fleet:
    """Lines to all members. A server that leaves and returns gets a new line, and drops what was dropped meanwhile.

    Versions and probes for the servers below a relay of ``groups`` go to the relay, in one request.
    """

    def __init__(self, run: str, secret: str) -> None:
        self._run, self._secret = run, secret
        self._lines: dict[ServerEndpoint, _Line] = {}
        self.groups: Sequence[RelayGroup] = ()
        self._away: dict[ServerEndpoint, set[str]] = {}  # adapters that former members, which may return, have to drop
        self._judged: dict[tuple[str, bytes], str] = {}  # why a layout does not fit a server's modules, or nothing
        self._judging = threading.Lock()

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

    def ping(self, server: ServerEndpoint, timeout_s: float) -> PingReply:
        """Raises PublishError if ``server``, a member or not, does not answer in time."""
        with contextlib.closing(AdminClient(server, self._secret)) as own:
            return own.ping(timeout_s)

    def ping_again(self, server: ServerEndpoint, timeout_s: float) -> PingReply:
        """``ping``, of a member over a connection that is kept: 512 TLS handshakes a second would fill a core."""
        line = self._lines.get(server)
        return self.ping(server, timeout_s) if line is None else line.pings.ping(timeout_s)

    def dismiss(self, servers: Sequence[ServerEndpoint], timeout_s: float) -> None:
        """Release leaving servers: they are no members any more, and no request is routed to them.

        Does not wait for their answers: one that misses this ends later.
        """

        def dismiss(server: ServerEndpoint) -> None:
            with contextlib.closing(AdminClient(server, self._secret)) as own:
                own.call(messages.DISMISS_PATH, b"", PingReply, timeout_s)

        pool = ThreadPoolExecutor(PINGS, thread_name_prefix="dismiss")
        for server in servers:
            pool.submit(dismiss, server)
        pool.shutdown(wait=False)

    def ping_all(self, servers: Sequence[ServerEndpoint], timeout_s: float) -> Answers[PingReply]:
        """Ping all ``servers``, ``PINGS`` at once; return the answers, and errors of those without in ``timeout_s``.

        One without an answer after half of the time is repeated beside the first, on a connection of its own: a link
        that loses a packet in a hundred does not make a server silent.
        """
        got: Answers[PingReply] = {}
        for start in range(0, len(servers), PINGS):
            got |= self._ping_all(servers[start : start + PINGS], timeout_s)
        return got

    def _ping_all(self, servers: Sequence[ServerEndpoint], timeout_s: float) -> Answers[PingReply]:
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
        return answers(first | {s: ping for s, ping in second.items() if not _answered(first[s])}, until)

    def drop(self, members: Sequence[ServerEndpoint], name: str, timeout_s: float) -> None:
        """Have ``members`` drop adapter ``name`` after their requests in progress. Does not wait for their answers.

        A server that fails, or returns later, drops it before its next version. Any thread, while members may change.
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
                self._judge(layout, line.client, timeout_s)
                if probe is not None and layout.payload is Payload.MERGED:
                    line.score_base(probe, timeout_s)
                line.checked.add(layout.digest)

        return {server: self._lines[server].thread.submit(check, self._lines[server]) for server in members}

    def _judge(self, layout: AdapterLayout, client: AdminClient, timeout_s: float) -> None:
        """`messages.check_served` of the server's modules, of equal ones once: for a large MoE it takes 0.2 s."""
        reply = client.modules(timeout_s)
        key = (layout.digest, hashlib.blake2b(reply).digest())
        with self._judging:
            if key not in self._judged:
                content = answered(client.server, messages.MODULES_PATH, 200, reply, messages.ModulesReply)
                self._judged[key] = ""
                try:
                    messages.check_served(layout, content)
                except AdapterError as error:
                    self._judged[key] = str(error)
        if reason := self._judged[key]:
            raise AdapterError(reason)

    def join(
        self,
        groups: Sequence[RelayGroup],
        sources: Sequence[list[messages.SourceEndpoint]],
        deadline: float,
        answer_s: float,
    ) -> dict[ServerEndpoint, Future[messages.JoinReply]]:
        """Request that servers join their groups by ``deadline``, of which ``sources`` are the endpoints.

        The first server that fails ends the formation for all that wait, servers and sources.
        """
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
        ended = threading.Event()

        def end(post: Future[messages.JoinReply]) -> None:
            if (error := post.exception()) is not None and not ended.is_set():
                ended.set()
                for endpoint in chain.from_iterable(sources):
                    end_formation(endpoint, self._secret, str(error))

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
            posts[server].add_done_callback(end)
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

        def body(servers: Iterable[ServerEndpoint]) -> Callable[[float], bytes]:
            layouts = [self._lines[server].layouts for server in servers]
            brings = known if all(manifest.layout in each for each in layouts) else new
            for each in layouts:
                each.add(manifest.layout)
            return lambda left_s: encode(Announcement(manifest=manifest, layout=brings, timeout_s=left_s))

        ready = {server for server in members if not self._lines[server].undropped}
        posts = self._relayed(ready, messages.PUBLISH_PATH, body, PublishReply, deadline, answer_s)
        for server in members:
            if server not in posts:
                line = self._lines[server]
                posts[server] = line.thread.submit(line.publish, body([server]), deadline, answer_s)
        return posts

    def _relayed(
        self,
        servers: Collection[ServerEndpoint],
        path: str,
        body: Callable[[Sequence[ServerEndpoint]], Callable[[float], bytes]],
        kind: type[T],
        deadline: float,
        answer_s: float,
    ) -> dict[ServerEndpoint, Future[T]]:
        """One request to each relay for those of ``servers`` that are below it; the answers of these.

        ``body(servers)(seconds left)`` is what they get. They fail where the relay does.
        """

        def send(line: _Line, content: Callable[[float], bytes], posts: dict[ServerEndpoint, Future[T]]) -> None:
            try:
                left_s = line.time_to_send(deadline)
                until_s = left_s + answer_s
                request = messages.RelayRequest(
                    path=path, body=content(left_s), servers=list(posts), timeout_s=EARLIER * until_s
                )
                reply = line.relay.call(messages.RELAY_PATH, request, messages.RelayReply, until_s)
            except ArealLoraError as e:
                for post in posts.values():
                    post.set_exception(e)
                return
            for (server, post), answer in zip(posts.items(), reply.answers, strict=True):
                try:
                    post.set_result(answered(server, path, answer.status, answer.body, kind))
                except ArealLoraError as e:
                    post.set_exception(e)

        relayed = dict[ServerEndpoint, Future[T]]()
        for group in self.groups:
            if (line := self._lines.get(group.relay) if group.relay else None) is None:
                continue
            if posts := {server: Future[T]() for server in group.members if server in servers}:
                line.relaying.submit(send, line, body(list(posts)), posts)
                relayed |= posts
        return relayed

    def probe(
        self,
        members: Sequence[ServerEndpoint],
        ref: AdapterRef,
        expected: ProbeExpectation,
        tolerance: float,
        deadline: float,
    ) -> dict[ServerEndpoint, Future[ProbeResult]]:
        """Score the probe on all members at once. The futures raise ParityError, or PublishError if a server fails."""
        request = msgspec.msgpack.encode(messages.ScoreRequest(model=str(ref), token_ids=expected.token_ids))
        scored = {server for server in members if repr(expected.token_ids) in self._lines[server].base_logprobs}
        relayed = self._relayed(
            scored, messages.SCORE_PATH, lambda _: lambda _: request, messages.ScoreReply, deadline, 0.0
        )

        def score(server: ServerEndpoint) -> ProbeResult:
            line = self._lines[server]
            base = line.score_base(expected, _left_s(deadline))
            served: list[list[float]] | None = None
            if server in relayed:
                with contextlib.suppress(PublishError):  # a relay that died: its servers may be well
                    served = relayed[server].result(_left_s(deadline)).logprobs
            if served is None:
                served = line.client.score(str(ref), expected.token_ids, _left_s(deadline))
            known = line.served_logprobs.setdefault(repr(expected.token_ids), {})
            before = None if expected.parent is None else known.get(expected.parent)
            known[ref] = served
            for old in sorted((r for r in known if r.name == ref.name), key=lambda r: r.version)[:-2]:
                del known[old]
            found = check_probe(ref, str(server), expected, served, base, tolerance, before)
            if found.mean_abs > tolerance:
                tie = "a probe sequence differs by up to %.2g nats, the others do not: a tie between experts"
                log.warning(f"%s on %s: {tie}", ref, server, found.max_abs)
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
