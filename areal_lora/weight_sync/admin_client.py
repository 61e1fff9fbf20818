"""Client of a rollout server's admin plane (``messages``), for trainers and for servers that relay requests."""

import http.client
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from areal_lora.errors import ManifestError, PublishError
from areal_lora.network.tls import Plane, authorization, client_context
from areal_lora.weight_sync import messages
from areal_lora.weight_sync.manifest import sent_later

M = TypeVar("M")


class AdminClient:
    """Blocking client of one server's admin plane over one persistent connection, one call at a time.

    Thread-safe. All methods raise PublishError if the server fails or ``timeout_s`` passes.
    """

    def __init__(self, server: messages.ServerEndpoint, secret: str) -> None:
        self.server = server
        self._headers = authorization(secret, Plane.ADMIN) | {"Content-Type": messages.CONTENT_TYPE}
        tls = client_context(secret, Plane.ADMIN)
        self._connection = http.client.HTTPSConnection(server.host, server.admin_port, context=tls)
        self._one_call = threading.Lock()

    def info(self, timeout_s: float) -> messages.InfoReply:
        return self.call(messages.INFO_PATH, None, messages.InfoReply, timeout_s)

    def modules(self, timeout_s: float) -> bytes:
        """An encoded `ModulesReply`, of a large MoE megabytes that take a tenth of a second to decode."""
        return bytes(self.call(messages.MODULES_PATH, None, msgspec.Raw, timeout_s))

    def join(self, request: messages.JoinRequest, timeout_s: float) -> messages.JoinReply:
        return self.call(messages.JOIN_PATH, request, messages.JoinReply, timeout_s)

    def publish(self, announcement: bytes, timeout_s: float) -> messages.PublishReply:
        """Raises ManifestError if the server refuses, PublishError if it fails."""
        return self.call(messages.PUBLISH_PATH, announcement, messages.PublishReply, timeout_s)

    def drop(self, name: str, timeout_s: float) -> messages.DropReply:
        """Have the server forget adapter ``name``; idempotent."""
        return self.call(messages.DROP_PATH, messages.DropRequest(name=name), messages.DropReply, timeout_s)

    def score(
        self, model: str | None, token_ids: list[list[int]], timeout_s: float, temperature: float = 1.0
    ) -> list[list[float]]:
        request = messages.ScoreRequest(model=model, token_ids=token_ids, temperature=temperature)
        return self.call(messages.SCORE_PATH, request, messages.ScoreReply, timeout_s).logprobs

    def ping(self, timeout_s: float = messages.PING_S) -> messages.PingReply:
        """Raises PublishError if the server or one of its workers does not answer (dead, hung or stopped)."""
        return self.call(messages.PING_PATH, None, messages.PingReply, timeout_s)

    def close(self) -> None:
        with self._one_call:
            self._connection.close()

    def call(self, path: str, body: messages.AdminMessage | bytes | None, kind: type[M], timeout_s: float) -> M:
        """Send a request, a GET if it has no ``body``; ``kind``: message of a 200. Raises ManifestError for a 409."""
        content = msgspec.msgpack.encode(body) if isinstance(body, messages.AdminMessage) else body
        return answered(self.server, path, *self.send(path, content, timeout_s), kind)

    def send(self, path: str, content: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of the answer, whatever they are."""
        method = "GET" if content is None else "POST"
        with self._one_call:
            try:
                return self._exchange(method, path, content, timeout_s)
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


def answered(server: messages.ServerEndpoint, path: str, status: int, answer: bytes, kind: type[M]) -> M:
    """The message of an answer, also of one that a relay has passed on. Raises as `call` does."""
    try:
        if status == http.client.CONFLICT:
            refusal = msgspec.msgpack.decode(answer, type=messages.RefusalReply)
            raise ManifestError(refusal.reason, f"server {server}: {refusal.detail}")
        if status == http.client.OK:
            return msgspec.msgpack.decode(answer, type=kind)
    except msgspec.MsgspecError as e:
        raise PublishError(f"{path} of server {server}: malformed answer: {e}") from e
    text = answer[:300].decode("utf-8", "replace")
    raise PublishError(f"{path} of server {server} answered {status}: {text}; see the server's log")


class RequestRelay:
    """A relay's requests to the servers below it, all at once, over connections that are kept until one fails."""

    def __init__(self, secret: str) -> None:
        self._secret, self._clients = secret, dict[str, AdminClient]()

    def send(self, request: messages.RelayRequest, came: float) -> messages.RelayReply:
        """Send ``request``, which came at ``came`` (time.monotonic), and return all answers. Blocks.

        A server that cannot be reached has a 502. Raises ManifestError for an announcement that is malformed.
        """
        later_s = time.monotonic() - came
        left_s = max(request.timeout_s - later_s, 0.01)
        body = sent_later(request.body, later_s) if request.path == messages.PUBLISH_PATH else request.body

        def send(server: messages.ServerEndpoint) -> messages.RelayedAnswer:
            try:
                status, answer = self._clients[server.name].send(request.path, body, left_s)
            except PublishError as e:
                status, answer = http.client.BAD_GATEWAY, str(e).encode()
            return messages.RelayedAnswer(status=status, body=answer)

        for server in request.servers:
            known = self._clients.get(server.name)
            if known is None or known.server != server:  # it was restarted
                self._clients[server.name] = AdminClient(server, self._secret)
        with ThreadPoolExecutor(max(1, len(request.servers)), thread_name_prefix="relay") as pool:
            return messages.RelayReply(answers=list(pool.map(send, request.servers)))
