"""Rank 0's connections to the rollout servers: requests to all servers at once, answers one by one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import msgspec

from areal_lora.errors import ArealLoraError, PublishError
from areal_lora.processes.log import get_logger
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.manifest import Envelope
from areal_lora.weight_sync.messages import JoinReply, JoinRequest, PublishReply, ServerEndpoint, SourceEndpoint
from areal_lora.weight_sync.probe import ProbeExpectation, ProbeResult, check_probe
from areal_lora.weight_sync.served import check_served
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
        self.base_logprobs: dict[str, list[list[float]]] = {}
        self.served_logprobs: dict[str, dict[AdapterRef, list[list[float]]]] = {}  # by probe, of the newest versions

    def close(self) -> None:
        """Close without waiting for the request in progress; queued requests have expired, or are quick."""
        self.thread.submit(self.client.close)
        self.thread.shutdown(wait=False)


class Fleet:
    """Lines to all members. A server that leaves and returns gets a new line."""

    def __init__(self, run: str, secret: str) -> None:
        self._run, self._secret = run, secret
        self._lines: dict[ServerEndpoint, _Line] = {}

    def keep(self, members: Iterable[ServerEndpoint]) -> None:
        """Open and close lines so that exactly ``members`` have one."""
        wanted = set(members)
        for server in self._lines.keys() - wanted:
            self._lines.pop(server).close()
        for server in wanted - self._lines.keys():
            self._lines[server] = _Line(server, self._secret)

    def close(self) -> None:
        self.keep(())

    def ping(self, server: ServerEndpoint, timeout_s: float) -> None:
        """Raises PublishError if ``server``, a member or not, does not answer in time."""
        AdminClient(server, self._secret).ping(timeout_s)

    def end(self, servers: Iterable[ServerEndpoint], timeout_s: float) -> None:
        """Request that members exit, so that the launcher restarts them without their versions."""
        posts = {s: self._lines[s].thread.submit(self._lines[s].client.shutdown, timeout_s) for s in servers}
        for server, e in errors(answers(posts, time.monotonic() + timeout_s)).items():
            log.warning("rollout server %s did not accept the request to exit: %s", server, e)

    def silent(self, servers: Sequence[ServerEndpoint], timeout_s: float) -> dict[ServerEndpoint, ArealLoraError]:
        """Ping all ``servers`` at once; return those that do not answer, with their errors."""
        pool, until = ThreadPoolExecutor(max(1, len(servers)), thread_name_prefix="ping"), time.monotonic() + timeout_s
        pings = {server: pool.submit(self.ping, server, timeout_s) for server in servers}
        pool.shutdown(wait=False)  # a ping that connects late and answers late takes longer than ``timeout_s``
        return errors(answers(pings, until))

    def hurry(self, servers: Sequence[ServerEndpoint], ref: AdapterRef, timeout_s: float) -> None:
        """Have ``servers`` stage ``ref`` at full speed. Any thread; does not wait for their answers."""
        pool = ThreadPoolExecutor(max(1, len(servers)), thread_name_prefix="hurry")
        for server in servers:
            pool.submit(_hurry, AdminClient(server, self._secret), ref, timeout_s)
        pool.shutdown(wait=False)

    def checked(self, members: Sequence[ServerEndpoint], layout: AdapterLayout) -> bool:
        """Whether all members passed ``check`` for ``layout``."""
        return all(layout.digest in self._lines[server].checked for server in members)

    def check(
        self, members: Sequence[ServerEndpoint], layout: AdapterLayout, timeout_s: float
    ) -> dict[ServerEndpoint, Future[None]]:
        """Check that members can serve ``layout``. Futures raise AdapterError, or PublishError for a dead server."""

        def check(line: _Line) -> None:
            if layout.digest not in line.checked:
                check_served(layout, line.client.modules(timeout_s))
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
        pace_s: float,
    ) -> dict[ServerEndpoint, Future[PublishReply]]:
        """Announce a version to all members; the layout is included if it was not sent since the join.

        The transfer has to end by ``deadline``; answers arrive up to ``answer_s`` later. Servers may take ``pace_s``
        for staging.
        """
        short, long, posts = Envelope(manifest, None), None, {}
        for server in members:
            line, announcement = self._lines[server], short
            if manifest.layout not in line.layouts:
                announcement = long = long or Envelope(manifest, layout)
                line.layouts.add(manifest.layout)
            posts[server] = line.thread.submit(_publish, line, announcement, deadline, answer_s, pace_s)
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
            key = repr(expected.token_ids)
            if key not in line.base_logprobs:
                line.base_logprobs[key] = line.client.score(None, expected.token_ids, _left_s(deadline))
            served = line.client.score(str(ref), expected.token_ids, _left_s(deadline))
            known = line.served_logprobs.setdefault(key, {})
            before = None if expected.parent is None else known.get(expected.parent)
            known[ref] = served
            for old in sorted((r for r in known if r.name == ref.name), key=lambda r: r.version)[:-2]:
                del known[old]
            return check_probe(ref, str(server), expected, served, line.base_logprobs[key], tolerance, before)

        return {server: self._lines[server].thread.submit(score, server) for server in members}


def _hurry(client: AdminClient, ref: AdapterRef, timeout_s: float) -> None:
    try:
        client.hurry(ref, timeout_s)
    except PublishError as e:
        log.debug("%s stays paced: %s", ref, e)  # the publish itself finds out about a lost server


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.01)


def _join(line: _Line, request: JoinRequest, deadline: float, answer_s: float) -> JoinReply:
    left_s = _time_to_send(line, deadline)
    return line.client.join(msgspec.structs.replace(request, timeout_s=left_s), left_s + answer_s)


def _publish(line: _Line, announcement: Envelope, deadline: float, answer_s: float, pace_s: float) -> PublishReply:
    left_s = _time_to_send(line, deadline)
    return line.client.publish(announcement.seal(left_s, pace_s), left_s + answer_s)


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
        self,
        members: Sequence[ServerEndpoint],
        manifest: ShardManifest,
        layout: AdapterLayout,
        deadline: float,
        pace_s: float,
    ) -> None:
        """Announce a version to all members, which may take ``pace_s`` for staging."""
        self._posts = self._fleet.publish(members, manifest, layout, deadline, self._answer_s, pace_s)
        self._due = deadline + self._answer_s

    def answers(self) -> tuple[dict[ServerEndpoint, PublishReply], dict[ServerEndpoint, ArealLoraError]]:
        """Wait for acknowledgements and errors; the errors are those of the joins if no version was announced."""
        got = answers(self._posts, self._due)
        failed = errors(got) if self._posts else errors(answers(self._joins, self._due))
        return {s: reply for s, reply in got.items() if isinstance(reply, PublishReply)}, failed
