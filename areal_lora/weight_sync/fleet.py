"""Rank 0's lines to the rollout servers: requests to all of them at once, answers one by one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from areal_lora.errors import ArealLoraError
from areal_lora.obs.log import get_logger
from areal_lora.types import AdapterRef, ShardManifest
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.manifest import Announcement, encode
from areal_lora.weight_sync.modules import check_served
from areal_lora.weight_sync.probe import ProbeExpectation, ProbeResult, check_probe
from areal_lora.weight_sync.transport import (
    AdminClient,
    JoinReply,
    JoinRequest,
    PublishReply,
    ServerEndpoint,
    SourceEndpoint,
)

LATER = 1.1  # a server's own diagnosis comes a little later than its workers' deadline

log = get_logger(__name__)

T = TypeVar("T")
Answers = dict[ServerEndpoint, T | ArealLoraError]


class _Line:
    """One server: a kept-open connection, and the thread that waits for its answers."""

    def __init__(self, server: ServerEndpoint, secret: str) -> None:
        self.client = AdminClient(server, secret)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"admin-{server.name}")
        self.layouts: set[str] = set()  # sent since the last join
        self.checked: set[str] = set()
        self.base_logprobs: dict[str, list[list[float]]] = {}
        self.served_logprobs: dict[str, dict[AdapterRef, list[list[float]]]] = {}  # of each probe, newest versions

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)
        self.client.close()


class Fleet:
    """The members' lines. A server that leaves and comes back starts anew."""

    def __init__(self, run: str, secret: str) -> None:
        self._run, self._secret = run, secret
        self._lines: dict[ServerEndpoint, _Line] = {}

    def keep(self, members: Iterable[ServerEndpoint]) -> None:
        """Have lines to exactly ``members``."""
        wanted = set(members)
        for server in self._lines.keys() - wanted:
            self._lines.pop(server).close()
        for server in wanted - self._lines.keys():
            self._lines[server] = _Line(server, self._secret)

    def close(self) -> None:
        self.keep(())

    def ping(self, server: ServerEndpoint, timeout_s: float) -> ArealLoraError | None:
        """Why ``server``, a member or not, does not answer in time; None if it does."""
        client = AdminClient(server, self._secret)
        try:
            client.ping(timeout_s)
        except ArealLoraError as e:
            return e
        return None

    def end(self, server: ServerEndpoint, timeout_s: float) -> None:
        """Tell a member to end, so that it is started again without what it holds."""
        try:
            self._lines[server].client.shutdown(timeout_s)
        except ArealLoraError as e:
            log.warning("rollout server %s could not be told to end: %s", server, e)

    def silent(self, servers: Sequence[ServerEndpoint], timeout_s: float) -> dict[ServerEndpoint, ArealLoraError]:
        """Which of ``servers`` do not answer a ping, and why; asks all at once."""
        with ThreadPoolExecutor(max(1, len(servers)), thread_name_prefix="ping") as pool:
            return errors(dict(zip(servers, pool.map(lambda s: self.ping(s, timeout_s), servers), strict=True)))

    def checked(self, members: Sequence[ServerEndpoint], layout: AdapterLayout) -> bool:
        """Whether all members were found to be able to serve ``layout``."""
        return all(layout.digest in self._lines[server].checked for server in members)

    def check(
        self, members: Sequence[ServerEndpoint], layout: AdapterLayout, timeout_s: float
    ) -> dict[ServerEndpoint, Future[None]]:
        """Find out. The futures raise AdapterError for a layout that does not fit, PublishError for a dead server."""

        def check(line: _Line) -> None:
            if layout.digest not in line.checked:
                check_served(layout, line.client.modules(timeout_s))
                line.checked.add(layout.digest)

        return {server: self._lines[server].thread.submit(check, self._lines[server]) for server in members}

    def join(
        self, members: Sequence[ServerEndpoint], sources: list[SourceEndpoint], timeout_s: float
    ) -> dict[ServerEndpoint, Future[JoinReply]]:
        """Tell every member which ranks its workers have in the sources' groups."""
        posts, first = {}, 1
        for server in members:
            line = self._lines[server]
            line.layouts.clear()
            ranks = list(range(first, first + server.workers))
            request = JoinRequest(run=self._run, endpoints=sources, ranks=ranks, timeout_s=timeout_s)
            posts[server] = line.thread.submit(line.client.join, request, timeout_s * LATER)
            first += server.workers
        return posts

    def publish(
        self, members: Sequence[ServerEndpoint], manifest: ShardManifest, layout: AdapterLayout, timeout_s: float
    ) -> dict[ServerEndpoint, Future[PublishReply]]:
        """Announce a version to all members; the layout goes along where it was not sent since the join.

        ``timeout_s`` is what the servers' workers get for the transfer.
        """
        short, long, posts = encode(Announcement(manifest=manifest, layout=None)), None, {}
        for server in members:
            line, body = self._lines[server], short
            if manifest.layout not in line.layouts:
                body = long = long or encode(Announcement(manifest=manifest, layout=layout))
                line.layouts.add(manifest.layout)
            posts[server] = line.thread.submit(line.client.publish, body, timeout_s * LATER)
        return posts

    def probe(
        self, members: Sequence[ServerEndpoint], ref: AdapterRef, expected: ProbeExpectation, tolerance: float,
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


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.01)


def answers(posts: Mapping[ServerEndpoint, Future[T]]) -> Answers[T]:
    """Every server's answer or error, after all have come; each is bounded by its request's time-out."""
    got: Answers[T] = {}
    for server, post in posts.items():
        try:
            got[server] = post.result()
        except ArealLoraError as e:
            got[server] = e
    return got


def errors(got: Answers[T]) -> dict[ServerEndpoint, ArealLoraError]:
    return {server: answer for server, answer in got.items() if isinstance(answer, ArealLoraError)}
