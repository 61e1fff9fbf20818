"""Messages and client of the admin plane: how a trainer tells servers about a publish.

HTTP over TLS of this run (``network.tls``). All bodies are msgpack (``msgspec``), at most ``MAX_BODY_BYTES`` long;
every request carries ``Authorization: Bearer <key of the admin plane>``.

=======  ==================  ======================================  =================================
method   path                request body                            answer
=======  ==================  ======================================  =================================
GET      ``/admin/info``     none                                    200 ``InfoReply``
GET      ``/admin/modules``  none                                    200 ``ModulesReply``
GET      ``/admin/ping``     none                                    200 ``PingReply``, 503 after ``PING_S``
POST     ``/admin/join``     ``JoinRequest``                         200 ``JoinReply``
POST     ``/admin/publish``  ``weight_sync.manifest.encode(a)``      200 ``PublishReply``
POST     ``/admin/score``    ``ScoreRequest``                        200 ``ScoreReply``
POST     ``/admin/shutdown`` none                                    200, then it ends to be started anew
=======  ==================  ======================================  =================================

A refusal is 409 with ``RefusalReply``; a missing or wrong key is 401, a longer body 413; anything else
that is not 200 is a failure of the server. ``/admin/join`` answers when all workers of the server
are members of all groups, ``/admin/publish`` when the version can be requested by name.

The trainer posts ``/admin/publish`` and broadcasts at the same time. A server must therefore
hand every announcement it can decode to its receivers, also one it is going to refuse:
``AdapterReceiver.begin`` drains the transfer of a refused version (or one that finds no free
slot, ``slot=None``), which keeps the groups usable for the next one. A version that is active
already is taken off the wire too and answered as before: when one server was lost, a trainer
sends again to all others.
"""

from __future__ import annotations

import http.client
import ssl
import threading
from typing import TypeVar

import msgspec

from areal_lora.errors import ManifestError, PublishError
from areal_lora.network.keys import Plane, authorization
from areal_lora.network.tls import client_context
from areal_lora.run_folder.rendezvous import bracketed

INFO_PATH = "/admin/info"
MODULES_PATH = "/admin/modules"
PING_PATH = "/admin/ping"
JOIN_PATH = "/admin/join"
PUBLISH_PATH = "/admin/publish"
SCORE_PATH = "/admin/score"
SHUTDOWN_PATH = "/admin/shutdown"
RESTART_EXIT = 75  # of a server that was shut down over the admin plane: EX_TEMPFAIL, the launcher starts it again
PING_S = 2.0  # a worker whose thread is silent for this long is taken for stopped
CONTENT_TYPE = "application/msgpack"
MAX_BODY_BYTES = 64 << 20  # a layout of 73,000 tensors takes 5 MB, a token of a sequence to be scored at most 5 bytes

M = TypeVar("M")


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all admin messages: immutable, unknown fields rejected."""


class ServerEndpoint(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One life of a rollout server: a restarted one has the same ``name`` and other ports.

    ``workers`` is its tensor parallel size. The admin plane always speaks TLS, the data plane if ``data_tls``.
    """

    name: str
    host: str
    admin_port: int
    data_port: int
    workers: int
    data_tls: bool = False

    @property
    def data_url(self) -> str:
        return f"{'https' if self.data_tls else 'http'}://{bracketed(self.host)}:{self.data_port}"

    def __str__(self) -> str:
        return f"{self.name} ({self.host}:{self.admin_port})"


class SourceEndpoint(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One broadcast group: the store of trainer rank ``source``, and what its members must agree on.

    ``world`` counts the source (rank 0) and all receivers. Who joins needs the run secret for the store, and
    ``token``, which prefixes its keys and was told over the admin plane.
    """

    source: int
    host: str
    port: int
    world: int
    token: str
    bucket_bytes: int
    backend: str = "gloo"


class ServerStats(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a server has done since it serves. ``idle_s`` of ``up_s`` seconds no sequence was running.

    ``running`` and ``waiting`` are sequences now; ``prompt_tokens`` counts each prompt once.
    ``interrupted`` sequences were cut and continued on a newer version, which read ``recomputed_tokens`` again.
    """

    up_s: float = 0.0
    idle_s: float = 0.0
    running: int = 0
    waiting: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    aborted: int = 0
    interrupted: int = 0
    recomputed_tokens: int = 0


class InfoReply(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a server is. ``refs`` are the versions that can be requested now."""

    run: str
    model: str
    base_digest: str
    workers: int
    max_lora_rank: int
    refs: list[str] = []
    stats: ServerStats = ServerStats()


class ModulesReply(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What can be adapted: (inputs, outputs) of every module by Hugging Face name; ``slots`` versions fit."""

    modules: dict[str, tuple[int, int]]
    slots: int
    max_rank: int


class PingReply(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server and the background thread of each of its workers have answered."""


class JoinRequest(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``ranks[w]`` is the rank of the server's worker ``w`` in every group (rank 0 is the source)."""

    run: str
    endpoints: list[SourceEndpoint]
    ranks: list[int]
    timeout_s: float


class JoinReply(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    workers: int


class StageResult(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker's receiver reports once per ``begin``, from its background thread.

    ``reason`` is empty if ``ok``, else a ``refusal.Refusal`` word. ``digest`` speaks of
    the verified bytes (``wire.adapter_digest``). ``slot`` is -1 where none was given.
    """

    ref: str
    slot: int
    ok: bool
    reason: str = ""
    detail: str = ""
    digest: str = ""
    wire_s: float = 0.0
    verify_s: float = 0.0
    write_s: float = 0.0


class PublishReply(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Acknowledgement of an activated version. ``phases`` in milliseconds: ``wire``, ``verify``, ``write``
    of the slowest worker; ``stage``, from the request until all workers have reported; ``commit``, for
    which generation stands still; ``commit_wait``, ``commit`` with the wait for its turn."""

    ref: str
    digest: str
    phases: dict[str, float]


class RefusalReply(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a 409. ``reason`` is a ``refusal.Refusal`` word."""

    reason: str
    detail: str


class ScoreRequest(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Score ``token_ids`` (N sequences) under ``model``, an adapter reference; None is the base model.

    Scores are log softmax(logits / ``temperature``).
    """

    model: str | None
    token_ids: list[list[int]]
    temperature: float = 1.0


class ScoreReply(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``logprobs[n][t]`` speaks of token t of sequence n given the tokens before it; entry 0 is 0.0."""

    logprobs: list[list[float]]


def encode_message(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_message(body: bytes, kind: type[M]) -> M:
    """Strict decode. Raises ``msgspec.ValidationError`` or ``msgspec.DecodeError``."""
    return msgspec.msgpack.decode(body, type=kind)


class AdminClient:
    """Blocking client of one server's admin plane over one kept-open connection, a call at a time.

    Safe to use from threads. ``ping`` has a connection of its own: it never waits for another call.
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

    def score(
        self, model: str | None, token_ids: list[list[int]], timeout_s: float, temperature: float = 1.0
    ) -> list[list[float]]:
        body = encode_message(ScoreRequest(model=model, token_ids=token_ids, temperature=temperature))
        return self.call("POST", SCORE_PATH, body, ScoreReply, timeout_s).logprobs

    def shutdown(self, timeout_s: float) -> None:
        """Have the server end with ``RESTART_EXIT``: what it holds must not be served any more."""
        self.call("POST", SHUTDOWN_PATH, b"", PingReply, timeout_s)

    def ping(self, timeout_s: float = PING_S) -> PingReply:
        """Raises PublishError if the server or one of its workers does not answer (dead, hung or stopped)."""
        own = AdminClient(self.server, self._secret)
        try:
            return own.call("GET", PING_PATH, None, PingReply, timeout_s)
        finally:
            own.close()

    def close(self) -> None:
        with self._one_call:
            self._connection.close()

    def call(self, method: str, path: str, body: bytes | None, kind: type[M], timeout_s: float) -> M:
        """One request; ``kind`` is the message a 200 carries. Raises ManifestError for a 409."""
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

    def _exchange(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        """(status, body). ``timeout_s`` bounds connecting and every read; admin answers are a single read."""
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
            # Servers close connections that were idle for a while. Every request may be repeated.
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
        return response.status, response.read()
