"""Client of a rollout server's admin plane (``weight_sync.messages``)."""

from __future__ import annotations

import http.client
import ssl
import threading
from typing import TypeVar

import msgspec

from areal_lora.errors import ManifestError, PublishError
from areal_lora.network.tls import Plane, authorization, client_context
from areal_lora.weight_sync.messages import (
    CONTENT_TYPE,
    DISMISS_PATH,
    DROP_PATH,
    INFO_PATH,
    JOIN_PATH,
    MODULES_PATH,
    PING_PATH,
    PING_S,
    PUBLISH_PATH,
    SCORE_PATH,
    SHUTDOWN_PATH,
    DropReply,
    DropRequest,
    InfoReply,
    JoinReply,
    JoinRequest,
    ModulesReply,
    PingReply,
    PublishReply,
    RefusalReply,
    ScoreReply,
    ScoreRequest,
    ServerEndpoint,
    decode_message,
    encode_message,
)

M = TypeVar("M")


class AdminClient:
    """Blocking client of one server's admin plane over one persistent connection, one call at a time.

    Thread-safe. ``ping`` uses a connection of its own: it never waits for another call.
    All methods raise PublishError if the server fails or ``timeout_s`` passes.
    """

    def __init__(self, server: ServerEndpoint, secret: str) -> None:
        self.server, self._secret = server, secret
        self._headers = authorization(secret, Plane.ADMIN) | {"Content-Type": CONTENT_TYPE}
        tls = client_context(secret, Plane.ADMIN)
        self._connection = http.client.HTTPSConnection(server.host, server.admin_port, context=tls)
        self._one_call = threading.Lock()

    def info(self, timeout_s: float) -> InfoReply:
        return self.call("GET", INFO_PATH, None, InfoReply, timeout_s)

    def modules(self, timeout_s: float) -> ModulesReply:
        return self.call("GET", MODULES_PATH, None, ModulesReply, timeout_s)

    def join(self, request: JoinRequest, timeout_s: float) -> JoinReply:
        return self.call("POST", JOIN_PATH, encode_message(request), JoinReply, timeout_s)

    def publish(self, announcement: bytes, timeout_s: float) -> PublishReply:
        """Raises ManifestError if the server refuses, PublishError if it fails."""
        return self.call("POST", PUBLISH_PATH, announcement, PublishReply, timeout_s)

    def drop(self, name: str, timeout_s: float) -> DropReply:
        """Have the server forget adapter ``name``; idempotent."""
        return self.call("POST", DROP_PATH, encode_message(DropRequest(name=name)), DropReply, timeout_s)

    def score(
        self, model: str | None, token_ids: list[list[int]], timeout_s: float, temperature: float = 1.0
    ) -> list[list[float]]:
        body = encode_message(ScoreRequest(model=model, token_ids=token_ids, temperature=temperature))
        return self.call("POST", SCORE_PATH, body, ScoreReply, timeout_s).logprobs

    def shutdown(self, timeout_s: float) -> None:
        """Request that the server exits with ``RESTART_EXIT``: its versions must not be served any more."""
        self.call("POST", SHUTDOWN_PATH, b"", PingReply, timeout_s)

    def ping(self, timeout_s: float = PING_S) -> PingReply:
        """Raises PublishError if the server or one of its workers does not answer (dead, hung or stopped)."""
        return self._aside("GET", PING_PATH, None, PingReply, timeout_s)

    def dismiss(self, timeout_s: float) -> None:
        """Release a leaving server: it is no member any more, and no request is routed to it."""
        self._aside("POST", DISMISS_PATH, b"", PingReply, timeout_s)

    def close(self) -> None:
        with self._one_call:
            self._connection.close()

    def call(self, method: str, path: str, body: bytes | None, kind: type[M], timeout_s: float) -> M:
        """Send one request; ``kind`` is the message of a 200. Raises ManifestError for a 409."""
        with self._one_call:
            try:
                status, answer = self._exchange(method, path, body, timeout_s)
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
                refusal = decode_message(answer, RefusalReply)
                raise ManifestError(refusal.reason, f"server {self.server}: {refusal.detail}")
            if status == http.client.OK:
                return decode_message(answer, kind)
        except msgspec.MsgspecError as e:
            raise PublishError(f"{method} {path} of server {self.server}: malformed answer: {e}") from e
        text = answer[:300].decode("utf-8", "replace")
        raise PublishError(f"{method} {path} of server {self.server} answered {status}: {text}; see the server's log")

    def _aside(self, method: str, path: str, body: bytes | None, kind: type[M], timeout_s: float) -> M:
        """``call`` over a connection of its own."""
        own = AdminClient(self.server, self._secret)
        try:
            return own.call(method, path, body, kind, timeout_s)
        finally:
            own.close()

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
