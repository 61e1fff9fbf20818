"""Rank 0's connections to the rollout servers: requests to all servers at once, answers one by one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

import msgspec

from areal_lora.errors import ArealLoraError, ManifestError, PublishError
from areal_lora.processes.startup import get_logger
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync.layout import AdapterLayout, Payload
from areal_lora.weight_sync.manifest import Envelope
from areal_lora.weight_sync.messages import (
    JoinReply,
    JoinRequest,
    PingReply,
    PublishReply,
    ServerEndpoint,
    SourceEndpoint,
    check_served,
)
from areal_lora.weight_sync.probe import ProbeExpectation, ProbeResult, check_probe
from areal_lora.weight_sync.trainer.admin_client import AdminClient

log = get_logger(__name__)

T = TypeVar("T")
Answers = dict[ServerEndpoint, T | ArealLoraError]


class _Line:
    """A persistent connection to one server, and the thread that waits for the server's answers."""

    def __init__(self, server: ServerEndpoint, secret: str) -> None:
        self.client = AdminClient(server, secret)
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

    def forget_scores(self, name: str) -> None:
        """Forget what adapter ``name`` scored. In the line's thread only, where a probe may be in progress."""
        for known in self.served_logprobs.values():
            for ref in [ref for ref in known if ref.name == name]:
                del known[ref]

    def close(self) -> None:
        """Close without waiting for the request in progress; queued requests have expired, or are quick."""
        self.thread.submit(self.client.close)
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

    def dismiss(self, servers: Sequence[ServerEndpoint], timeout_s: float) -> None:
        """Release leaving servers. Does not wait for their answers: one that misses this ends later."""
        pool = ThreadPoolExecutor(max(1, len(servers)), thread_name_prefix="dismiss")
        for server in servers:
            pool.submit(_dismiss, AdminClient(server, self._secret), timeout_s)
        pool.shutdown(wait=False)

    def end(self, servers: Iterable[ServerEndpoint], timeout_s: float) -> None:
        """Request that members exit, so that the launcher restarts them without their versions."""
        posts = {s: self._lines[s].thread.submit(self._lines[s].client.shutdown, timeout_s) for s in servers}
        for server, e in errors(answers(posts, time.monotonic() + timeout_s)).items():
            log.warning("rollout server %s did not accept the request to exit: %s", server, e)

    def silent(self, servers: Sequence[ServerEndpoint], timeout_s: float) -> dict[ServerEndpoint, ArealLoraError]:
        """Ping all ``servers`` at once; return those that do not answer, with their errors.

        A ping is several packets on a connection of its own. One without an answer after half of the time is repeated
        beside the first: a link that loses a packet in a hundred does not make a server silent.
        """
        pool = ThreadPoolExecutor(max(1, 2 * len(servers)), thread_name_prefix="ping")
        until = time.monotonic() + timeout_s
        first = {server: pool.submit(self.ping, server, timeout_s) for server in servers}
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
            with contextlib.suppress(
                RuntimeError
            ):  # the publisher thread has closed the line: it is no member any more
                line.thread.submit(_drop, line, timeout_s)

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
                check_served(layout, line.client.modules(timeout_s))
                if probe is not None and layout.payload is Payload.MERGED:
                    line.score_base(probe, timeout_s)
                line.checked.add(layout.digest)

        return {server: self._lines[server].thread.submit(check, self._lines[server]) for server in members}

    def join(
        self, members: Sequence[ServerEndpoint], sources: list[SourceEndpoint], deadline: float, answer_s: float
    ) -> dict[ServerEndpoint, Future[JoinReply]]:
        """Request that every member joins the sources' groups by ``deadline``, with the ranks of its workers."""
        posts, first = {}, 1
        for server in members:
            line = self._lines[server]
            line.layouts.clear()
            ranks = list(range(first, first + server.workers))
            request = JoinRequest(run=self._run, endpoints=sources, ranks=ranks, timeout_s=0.0)
            posts[server] = line.thread.submit(_join, line, request, deadline, answer_s)
            first += server.workers
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
        short, long, posts = Envelope(manifest, None), None, {}
        for server in members:
            line, announcement = self._lines[server], short
            if manifest.layout not in line.layouts:
                announcement = long = long or Envelope(manifest, layout)
                line.layouts.add(manifest.layout)
            posts[server] = line.thread.submit(_publish, line, announcement, deadline, answer_s)
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


def _dismiss(client: AdminClient, timeout_s: float) -> None:
    try:
        client.dismiss(timeout_s)
    except PublishError as e:
        log.debug("%s was not dismissed: %s", client.server, e)  # it has ended, or ends after its grace


def _drop(line: _Line, timeout_s: float) -> None:
    for name in sorted(line.undropped):
        line.forget_scores(name)
        try:
            line.client.drop(name, timeout_s)
        except (PublishError, ManifestError) as e:
            log.warning("%s; adapter %s is dropped there before the next version", e, name)
        else:
            line.undropped.discard(name)


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.01)


def _join(line: _Line, request: JoinRequest, deadline: float, answer_s: float) -> JoinReply:
    left_s = _time_to_send(line, deadline)
    return line.client.join(msgspec.structs.replace(request, timeout_s=left_s), left_s + answer_s)


def _publish(line: _Line, announcement: Envelope, deadline: float, answer_s: float) -> PublishReply:
    _drop(line, _left_s(deadline))
    left_s = _time_to_send(line, deadline)
    return line.client.publish(announcement.seal(left_s), left_s + answer_s)


def _time_to_send(line: _Line, deadline: float) -> float:
    """Remaining seconds when a queued request is sent. Raises PublishError if none remain."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise PublishError(f"server {line.client.server} was sent no request: the previous one took all the time")
    return left_s


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


class AttemptRequests:
    """Requests of one attempt to all members. Answers are due ``answer_s`` after the deadline of the transfer."""

    def __init__(self, fleet: Fleet, answer_s: float) -> None:
        self._fleet, self._answer_s = fleet, answer_s
        self._joins: dict[ServerEndpoint, Future[JoinReply]] = {}
        self._posts: dict[ServerEndpoint, Future[PublishReply]] = {}
        self._due = 0.0  # time.monotonic

    def clear(self) -> None:
        self._joins, self._posts = {}, {}

    def join(self, members: Sequence[ServerEndpoint], sources: list[SourceEndpoint], deadline: float) -> None:
        """Request that every member joins the groups of ``sources``."""
        self._joins = self._fleet.join(members, sources, deadline, self._answer_s)
        self._due = deadline + self._answer_s

    def await_joins(self) -> None:
        """Raises PublishError for a member that did not join."""
        for answer in answers(self._joins, self._due).values():
            if isinstance(answer, ArealLoraError):
                raise answer

    def publish(
        self, members: Sequence[ServerEndpoint], manifest: ShardManifest, layout: AdapterLayout, deadline: float
    ) -> None:
        """Announce a version to all members."""
        self._posts = self._fleet.publish(members, manifest, layout, deadline, self._answer_s)
        self._due = deadline + self._answer_s

    def answers(self) -> tuple[dict[ServerEndpoint, PublishReply], dict[ServerEndpoint, ArealLoraError]]:
        """Wait for acknowledgements and errors; the errors are those of the joins if no version was announced."""
        got = answers(self._posts, self._due)
        failed = errors(got) if self._posts else errors(answers(self._joins, self._due))
        return {s: reply for s, reply in got.items() if isinstance(reply, PublishReply)}, failed
