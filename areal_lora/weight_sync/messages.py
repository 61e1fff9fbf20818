"""Messages of the admin plane: a trainer's requests to the rollout servers during a publish.

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
POST     ``/admin/drop``     ``DropRequest``                         200 ``DropReply``
POST     ``/admin/score``    ``ScoreRequest``                        200 ``ScoreReply``
POST     ``/admin/dismiss``  none                                    200: no publish counts on the server any more
POST     ``/admin/relay``    ``RelayRequest``                        200 ``RelayReply``
=======  ==================  ======================================  =================================

A refusal is 409 with ``RefusalReply``; a missing or wrong key is 401, a longer body 413; anything else that is not 200
is a failure of the server. ``/admin/join`` answers when all workers of the server are members of all groups,
``/admin/publish`` when the version can be requested by name.

The trainer posts ``/admin/publish`` and broadcasts at the same time. A server must therefore pass every announcement
that it can decode to its receivers, also one that it refuses: ``AdapterReceiver.start`` drains the transfer, and the
groups stay usable. That of a version that is active already is drained and acknowledged again: when a server was lost,
the trainer sends the version again to all others.

`check_served` compares names and sizes of an adapter with the modules of a server, once, before step 0: vLLM ignores
unknown names, so a publish would succeed, and parts of the policy would be the base model's.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from areal_lora.errors import AdapterError, ManifestError, RefusalReason
from areal_lora.families.family import covers
from areal_lora.families.registry import path_of, target_of
from areal_lora.network.addresses import bracketed
from areal_lora.types import AdapterStructure
from areal_lora.weight_sync.layout import AdapterLayout, Payload, Shape

INFO_PATH = "/admin/info"
MODULES_PATH = "/admin/modules"
PING_PATH = "/admin/ping"
JOIN_PATH = "/admin/join"
PUBLISH_PATH = "/admin/publish"
DROP_PATH = "/admin/drop"
SCORE_PATH = "/admin/score"
DISMISS_PATH = "/admin/dismiss"
RELAY_PATH = "/admin/relay"
PING_S = 2.0  # a worker whose thread does not answer for this long counts as stopped
CONTENT_TYPE = "application/msgpack"
MAX_BODY_BYTES = 64 << 20  # a layout of 73,000 tensors takes 5 MB, a token of a sequence to be scored at most 5 bytes


class AdminMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all admin messages: immutable, unknown fields rejected."""


class ServerEndpoint(AdminMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One session of a rollout server: a restarted server has the same ``name`` and other ports.

    ``workers`` is its tensor parallel size. The admin plane always uses TLS, the data plane if ``data_tls``. One that
    stands for a server elsewhere does not relay.
    """

    name: str
    host: str
    admin_port: int
    data_port: int
    workers: int
    data_tls: bool = False
    relays: bool = True

    @property
    def data_url(self) -> str:
        return f"{'https' if self.data_tls else 'http'}://{bracketed(self.host)}:{self.data_port}"

    def __str__(self) -> str:
        return f"{self.name} ({self.host}:{self.admin_port})"


class SourceEndpoint(AdminMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One broadcast group: the store of trainer rank ``source``, and the settings that all members share.

    ``world`` counts rank 0, the source or a relay of its bytes, and all receivers. A member needs the run secret for
    the store, and ``token``, which prefixes the store's keys and is sent over the admin plane. ``library`` is the name
    and version of the backend's library at the source, which all members must share; empty if versions may differ.
    """

    source: int
    host: str
    port: int
    world: int
    token: str
    bucket_bytes: int
    backend: str = "gloo"
    library: str = ""


class ServerStats(AdminMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counters of a server since it started to serve. In ``idle_s`` of ``up_s`` seconds no sequence was running.

    ``prompt_tokens`` counts each prompt once,
    ``cached_tokens`` those of them that the prefix cache had.
    ``interrupted`` sequences were cut and continued on a newer version, which recomputed ``recomputed_tokens``.
    At the engine's last answer ``running`` sequences had places in the KV cache, of which ``kv_cache_share`` was in
    use, and ``waiting`` did not. ``preemptions``: a sequence lost its place and is computed again.
    """

    up_s: float = 0.0
    idle_s: float = 0.0
    running: int = 0
    waiting: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    aborted: int = 0
    interrupted: int = 0
    recomputed_tokens: int = 0
    kv_cache_share: float = 0.0
    preemptions: int = 0


class InfoReply(AdminMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of a server. ``refs`` are the versions that can be requested now."""

    run: str
    model: str
    base_digest: str
    workers: int
    max_lora_rank: int
    refs: list[str] = []
    stats: ServerStats = ServerStats()


class ModulesReply(AdminMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Modules that can be adapted: (inputs, outputs) by Hugging Face name; ``slots`` versions fit, as ``payload``.

    A slot takes ``slot_bytes`` on all workers together; 0: not known.
    """

    modules: dict[str, tuple[int, int]]
    slots: int
    max_rank: int
    payload: Payload = Payload.UNMERGED
    slot_bytes: int = 0


class PingReply(AdminMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server and the background thread of each of its workers have answered.

    ``leaving``: the server is about to end. It takes part in publishes until it is dismissed, and takes no requests.
    ``busy``: a publish or a join is in progress.
    """

    leaving: bool = False
    busy: bool = False


class JoinRequest(AdminMessage, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """``ranks[w]`` is the rank of the server's worker ``w`` in every group of ``endpoints`` (rank 0 sends).

    Worker 0 sends what arrives on to the groups ``below`` (``link.relays``), as their rank 0. None: keep the groups.
    """

    run: str
    endpoints: list[SourceEndpoint] | None
    ranks: list[int]
    timeout_s: float
    below: list[SourceEndpoint] | None = None


class JoinReply(AdminMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    workers: int


class StageResult(AdminMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Report of a worker's receiver, once per ``start``, from its background thread.

    ``reason``: a `RefusalReason`, empty if ``ok``. ``digest``: `adapter_digest` of the verified bytes. No slot: -1.
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


class PublishReply(AdminMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Acknowledgement of an activated version. ``phases`` in milliseconds: ``wire``, ``verify`` and ``write`` of the
    slowest worker; ``stage`` of all; ``commit``, the pause of generation; ``commit_wait``, that and its turn."""

    ref: str
    digest: str
    phases: dict[str, float]


class DropRequest(AdminMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Forget adapter ``name`` and free all that it holds: it is deleted, and may be published again."""

    name: str


class DropReply(AdminMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """No request gets the adapter any more. ``running`` ones keep their versions' slots until they end."""

    running: int


class RefusalReply(AdminMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a 409. ``reason`` is a `RefusalReason`."""

    reason: str
    detail: str


class ScoreRequest(AdminMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Score ``token_ids`` (N sequences) under ``model``, an adapter reference; None is the base model.

    Scores are log softmax(logits / ``temperature``).
    """

    model: str | None
    token_ids: list[list[int]]
    temperature: float = 1.0


class ScoreReply(AdminMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``logprobs[n][t]`` is that of token t of sequence n given the tokens before it; entry 0 is 0.0.

    Empty where the base was requested and the server has none any more (merged rollouts).
    """

    logprobs: list[list[float]]


class RelayRequest(AdminMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST ``body`` to ``path`` of the ``servers`` below a relay, each of which has ``timeout_s`` to answer."""

    path: str
    body: bytes
    servers: list[ServerEndpoint]
    timeout_s: float


class RelayedAnswer(AdminMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answer of one server; 502 with the error if there is none."""

    status: int
    body: bytes


class RelayReply(AdminMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In the order of ``RelayRequest.servers``."""

    answers: list[RelayedAnswer]


for _kind in AdminMessage.__subclasses__():  # msgspec's first decoding of a type by several threads ends the process
    msgspec.msgpack.Decoder(_kind)


SHOWN = 3  # modules, servers, or receivers named in an error


def listed(texts: Sequence[str], separator: str = ", ") -> str:
    """The first ``SHOWN`` of ``texts`` for an error, and how many more there are."""
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return separator.join(texts[:SHOWN]) + more


LORA_A, LORA_B, WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"


def covered(module: str, target_modules: Iterable[str]) -> bool:
    """Whether canonical targets cover a Hugging Face module (name without prefix)."""
    found, targets = target_of(module), tuple(target_modules)
    return (found is not None and covers(targets, *found)) or path_of(module) in targets


def served_shapes(
    modules: Mapping[str, tuple[int, int]], structure: AdapterStructure, payload: Payload = Payload.UNMERGED
) -> dict[str, Shape]:
    """Every full name that a version of an adapter of ``structure`` must have on a server with these modules."""
    shapes: dict[str, Shape] = {}
    for module, (inputs, outputs) in modules.items():
        if not covered(module, structure.target_modules):
            continue
        if payload is Payload.MERGED:
            shapes[module + WEIGHT] = (outputs, inputs)
        else:
            rank = structure.rank_of(module)
            shapes |= {module + LORA_A: (rank, inputs), module + LORA_B: (outputs, rank)}
    return shapes


def check_targets(modules: Iterable[str], structure: AdapterStructure) -> None:
    """Raise ManifestError (``targets``) unless every target of ``structure`` covers one of a server's ``modules``."""
    targets, served = structure.target_modules, list(modules)
    ignored = [t for t in targets if not any(covered(module, [t]) for module in served)]
    if ignored or not targets:
        raise ManifestError(RefusalReason.TARGETS, f"no served module matches {ignored or 'an empty list of targets'}")


def check_served(layout: AdapterLayout, reply: ModulesReply) -> None:
    """Raise AdapterError with the modules' names unless a server adapts exactly the trainer's modules."""
    structure = layout.structure
    if layout.payload is not reply.payload:
        modes = f"the adapter is published {layout.payload}, the server expects it {reply.payload}"
        raise AdapterError(f"{modes}; start trainer and servers with one rollout.adapter_mode")
    if layout.payload is Payload.UNMERGED and structure.max_rank > reply.max_rank:
        ranks = f"the adapter has rank {structure.max_rank}, the servers hold up to {reply.max_rank}"
        raise AdapterError(f"{ranks}; raise rollout.max_lora_rank")
    wanted = served_shapes(reply.modules, structure, layout.payload)
    wire = {t.name: t.shape for s in layout.shards for t in s.tensors}
    has = wire | {name: wire[target] for name, target in layout.aliases.items()}
    targets = ", ".join(structure.target_modules)
    for what, names in (
        ("vLLM would ignore", has.keys() - wanted.keys()),
        ("the trainer does not adapt, the servers expect them for these targets:", wanted.keys() - has.keys()),
        ("trainer and servers differ in the size of", {n for n in has.keys() & wanted.keys() if has[n] != wanted[n]}),
    ):
        modules = sorted({n.removesuffix(LORA_A).removesuffix(LORA_B).removesuffix(WEIGHT) for n in names})
        if modules:
            raise AdapterError(
                f"the adapter ({targets}): {what} {listed(modules)}; "
                "change adapters.target_modules, or use one base checkpoint on both sides"
            )
