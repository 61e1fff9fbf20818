"""The shared records of the package: frozen, slotted, keyword-only.

Shapes are written ``[T]`` (tokens of one sequence or of a packed batch) and ``[N]`` (sequences). Entry ``t`` of every
per-token array describes token ``t``: ``logprobs[t]`` is the log-probability of token ``t`` given the tokens before
it, so entry 0 of a sequence is meaningless and always masked (contract C10).

Example, one trajectory of a prompt of 3 tokens and an answer of 2::

    token_ids         p0  p1  p2  a0  a1
    loss_mask          0   0   0   1   1
    rollout_logprobs   0   0   0  -.2 -.7
    versions          -1  -1  -1   4   4
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any

from areal_lora.tokens import (
    MOST_KEPT as MOST_KEPT,
    ArrayLike as ArrayLike,
    RouteShape as RouteShape,
    TokenColumns as TokenColumns,
)

if TYPE_CHECKING:
    import torch

THOUGHT_START, THOUGHT_END = "<think>", "</think>"
MOST_STOPS, STOP_CHARACTERS = 64, 256
"""Texts that end an answer, and the length of one: the server's process compares each with every token."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class AdapterRef:
    """One immutable version of one adapter. ``str(ref)`` is ``name@vN``, also the model name served."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name}@v{self.version}"

    @classmethod
    def parse(cls, text: str) -> AdapterRef:
        """Inverse of ``str``; raises ValueError for anything else."""
        name, sep, version = text.rpartition("@v")
        if not sep or not name or not version.isdecimal():
            raise ValueError(f"{text!r} is not an adapter reference of the form name@vN")
        return cls(name=name, version=int(version))


class ExpertLayout(StrEnum):
    """Layout of LoRA on MoE experts: one adapter per expert, one shared by a layer's experts, or half of each.

    ``shared_outer`` shares the sides that face the hidden state: lora_A of fc1 (gate, up) and lora_B of fc2 (down).
    """

    PER_EXPERT = "per_expert"
    SHARED = "shared"
    SHARED_OUTER = "shared_outer"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStructure:
    """Which matrices an adapter of a base has, and their scale. Adapters of one structure differ in numbers only.

    ``target_modules`` are Megatron names (``linear_qkv``, ``linear_proj``, ``linear_fc1``, ``linear_fc2``), with a
    scope prefix (``expert.linear_fc1``) if only some occurrences of the layer are selected (`families.targets`). With
    ``value_head`` the model gives one value per token in place of logits: a critic.

    ``rank_pattern`` and ``alpha_pattern`` give some modules other numbers than ``rank`` and ``alpha``: pairs of a
    regular expression and a number. As in PEFT, the first one counts that matches the whole of a Hugging Face module
    path, or its end after a dot.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    expert_layout: ExpertLayout = ExpertLayout.PER_EXPERT
    rslora: bool = False
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    value_head: bool = False

    @property
    def max_rank(self) -> int:
        """No module has a higher one."""
        return max([self.rank, *(rank for _, rank in self.rank_pattern)])

    def rank_of(self, module: str) -> int:
        """Inner size of the product at a Hugging Face module path, ``model.layers.0.self_attn.q_proj``."""
        return next((rank for pattern, rank in self.rank_pattern if matches(pattern, module)), self.rank)

    def alpha_of(self, module: str) -> float:
        return next((alpha for pattern, alpha in self.alpha_pattern if matches(pattern, module)), self.alpha)

    def scale_of(self, module: str) -> float:
        """What multiplies B A: alpha / rank, with rsLoRA alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732)."""
        alpha, rank = self.alpha_of(module), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def bare(self) -> AdapterStructure:
        """The structure alone, without name and base; the order of targets has no meaning."""
        values = {f.name: getattr(self, f.name) for f in fields(AdapterStructure)}
        return AdapterStructure(**values | {"target_modules": tuple(sorted(self.target_modules))})


def matches(pattern: str, module: str) -> bool:
    """Whether a pattern of `AdapterStructure` names a module. Raises re.error for a pattern that is none."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec(AdapterStructure):
    """An adapter without its weights: its structure, its name and its base."""

    name: str
    base_model: str
    dropout: float = 0.0


class Outcome(StrEnum):
    """End of a rollout. Only ``ok`` is trained on (contract C8)."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    ABORTED = "aborted"


class Cause(StrEnum):
    """Why user code failed: ``code`` fails again with the same input, ``unreachable`` waits for a connection."""

    OTHER = "other"
    CODE = "code"
    UNREACHABLE = "unreachable"


class Correction(IntEnum):
    """What `behaviour_correction: auto` chooses for a step, from the weakest on; ``obs`` shows it by its number."""

    NONE = 0
    TRUNCATE = 1
    MASK = 2


class AdapterPhase(StrEnum):
    """State of an adapter in a run; it is here because the trainer decides it and ``obs`` records and shows it.

    ``pending`` until its first version is published, ``active`` while it is trained, ``draining`` after its last step
    until its last evaluation and export. ``failed`` has a reason; only what all adapters share ends the run.
    ``paused`` and ``deleted`` are those of a desired state (`run_folder.paths`).
    """

    PENDING = "pending"
    ACTIVE = "active"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"
    DELETED = "deleted"
    PAUSED = "paused"

    @property
    def trains(self) -> bool:
        """Whether further steps can come."""
        return self in (AdapterPhase.PENDING, AdapterPhase.ACTIVE, AdapterPhase.PAUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One problem: ``uid`` is stable across runs.

    ``prompt`` is the text of the problem. With ``messages`` it is shown to people only: the model gets the messages,
    written by its tokenizer's chat template. ``answer`` is the gold answer for the reward, any JSON value or None.
    ``columns`` has all columns of the data set's row.
    """

    uid: str
    prompt: str
    answer: Any
    messages: tuple[dict[str, Any], ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gold(self) -> str:
        """``answer`` as text, for people; empty if there is none."""
        return gold_text(self.answer)


def gold_text(answer: Any) -> str:
    """A gold answer of any JSON type as text."""
    return answer or "" if answer is None or isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def content_text(content: Any) -> str:
    """Text of a message's content: of a text, of text parts, of nothing. Raises ValueError for what is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(f"type {type(content).__name__}, not a text or a list of parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise ValueError(f"part {i} is of type {kind}; this model takes text parts only")
        texts.append(text)
    return "".join(texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A server's result for one answer of A tokens, ``columns``. The server reports versions token by token.

    ``top_logprobs`` maps ids of the likeliest tokens to log-probabilities, where they were requested.
    ``prompt_routes`` are those of the tokens before, from number ``routes_from`` on, where the server returned routes.
    """

    columns: TokenColumns
    finish_reason: str
    text: str = ""
    top_logprobs: list[dict[int, float]] | None = None  # [A]
    prompt_routes: bytes = b""  # [P - routes_from, L, K]
    routes_from: int = 0

    @property
    def token_ids(self) -> list[int]:
        return memoryview(self.columns.token_ids).cast("i").tolist()

    @property
    def logprobs(self) -> list[float]:
        """[A], in the whole distribution, as `top_logprobs`."""
        values: list[float] = (self.columns.scores + self.columns.masses).tolist()
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Prompt, answers and the text between them as one sequence of T tokens, ``columns``, with reward and outcome.

    ``sample`` is the index of its sample in the group (0 to ``n_samples`` - 1). Several trajectories of one
    sample (an agent's conversations) have the same reward. The answer of a ``given`` trajectory is the data set's:
    its log-probabilities and versions are those of the version that scored it, and it is imitated. ``turn_rewards`` are
    pairs of the index of a turn's last token and the part of the reward that the turn earned; index 0: what the sample
    earned in earlier conversations.
    """

    uid: str
    sample: int
    adapter: AdapterRef
    columns: TokenColumns
    reward: float
    outcome: Outcome = Outcome.OK
    finish_reason: str = "stop"
    detail: str = ""
    components: dict[str, float] = field(default_factory=dict)  # named parts of the reward
    correct: bool | None = None  # None: not scored, or no rule for it
    given: bool = False
    cause: Cause = Cause.OTHER  # of an outcome that is not ok
    turn_rewards: tuple[tuple[int, float], ...] = ()

    @property
    def truncated(self) -> bool:
        """Whether the run's limit of tokens, turns or time ended it."""
        return self.finish_reason in ("length", "max_turns", "timeout")

    @property
    def token_ids(self) -> list[int]:
        return memoryview(self.columns.token_ids).cast("i").tolist()

    @property
    def loss_mask(self) -> list[int]:
        """1 on the model's own tokens."""
        values: list[int] = (self.columns.each_version >= 0).astype(int).tolist()
        return values

    @property
    def rollout_logprobs(self) -> list[float]:
        return [*memoryview(self.columns.logprobs).cast("f")]

    @property
    def versions(self) -> list[int]:
        values: list[int] = self.columns.each_version.tolist()
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """All trajectories of one (epoch, prompt): the unit of GRPO and of exactly-once consumption.

    ``baseline`` is the reward of a greedy answer to the same prompt, which is not trained on; None without one.
    """

    uid: str  # "<epoch>:<sample uid>"
    trajectories: tuple[Trajectory, ...]
    baseline: float | None = None

    def recorded(self) -> TrajectoryGroup:
        """Without what only training needs: routes, which are 392 bytes a token, kept ids and a teacher's scores."""
        each = ((t, t.columns) for t in self.trajectories)
        bare = (replace(t, columns=TokenColumns(c.token_ids, c.logprobs, c.versions)) for t, c in each)
        return replace(self, trajectories=tuple(bare))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """N packed sequences; ``cu_seqlens[i]:cu_seqlens[i+1]`` are the tokens of sequence i.

    There is no padding outside the engines (contract C10). Sequence i is of adapter ``adapters[i]``, prompt group
    ``group_ids[i]``, sample ``sample_ids[i]``; those of one sample share its reward and thus its advantage. Its first
    ``shared_starts[i]`` tokens (or more) are those of the one before. ``given[i]``: see `Trajectory`. ``truncated[i]``:
    whether any trajectory of its sample is. ``baselines[i]``: see `TrajectoryGroup`, NaN where there is none;
    ``components[i]``: the reward's C named parts, NaN likewise. ``values[t]`` is a critic's value of the state before
    token t, ``returns[t]`` what it should have been, ``weights[t]`` a client's weight in the loss. [H]: of sequences
    ``held``.
    ``only``: of all micro-batches passes compute those that have one of these sequences, of which there are some.
    ``zero_advantage``: sequences that have no gradient; a training pass computes them forward only.
    ``routes[t]``: experts that the server chose, of L layers with experts; -1: own choice; ``old_routes[t]``: what the
    proximal pass chose. ``kept[t]``: ids over which log-probabilities of token t are normalised; -1 alone: all.
    ``log_mass``: see `TokenColumns`.
    """

    token_ids: torch.Tensor  # [H] int32
    cu_seqlens: torch.Tensor  # [N+1] int64
    loss_mask: torch.Tensor  # [T] bool
    rollout_logprobs: torch.Tensor  # [H] fp32
    versions: torch.Tensor  # [H] int32
    shared_starts: torch.Tensor  # [N] int64
    rewards: torch.Tensor  # [N] fp32
    group_ids: torch.Tensor  # [N] int64
    sample_ids: torch.Tensor  # [N] int64
    given: torch.Tensor  # [N] bool
    adapters: tuple[str, ...]  # [N]
    held: torch.Tensor | None = None  # [N] bool; None: all
    only: torch.Tensor | None = None  # [N] bool; None: all
    zero_advantage: torch.Tensor | None = None  # [N] bool; None: no sequence
    truncated: torch.Tensor | None = None  # [N] bool; None: no sequence
    baselines: torch.Tensor | None = None  # [N] fp32
    components: torch.Tensor | None = None  # [N, C] fp32
    component_names: tuple[str, ...] = ()  # [C]
    turn_rewards: torch.Tensor | None = None  # [T] fp32, 0 but at a turn's last token; None: no turn has its own
    prox_logprobs: torch.Tensor | None = None  # [T] fp32
    ref_logprobs: torch.Tensor | None = None  # [T] fp32
    values: torch.Tensor | None = None  # [T] fp32
    advantages: torch.Tensor | None = None  # [T] fp32
    returns: torch.Tensor | None = None  # [T] fp32
    weights: torch.Tensor | None = None  # [T] fp32
    routes: torch.Tensor | None = None  # [H, L, K] int16
    old_routes: torch.Tensor | None = None  # [H, L, K] int16
    kept: torch.Tensor | None = None  # [H, most] int32
    log_mass: torch.Tensor | None = None  # [H] fp32

    @property
    def n_sequences(self) -> int:
        return int(self.cu_seqlens.numel()) - 1

    @property
    def n_tokens(self) -> int:
        return int(self.loss_mask.numel())


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardManifest:
    """Announcement of a publish (contract C3).

    ``layout`` is the digest of the ``weight_sync.layout.AdapterLayout`` in use: names, shapes, offsets, rank, alpha,
    targets; the tensors' fingerprints follow on the wire. ``session`` counts starts of the run's trainer, and
    ``resumed_from`` is the version that it has loaded: a version is what its session and its number name.
    """

    run: str
    ref: AdapterRef
    parent: AdapterRef | None
    base_digest: str
    layout: str
    session: int = 0
    resumed_from: int = 0

    def shares(self, ref: AdapterRef, session: int) -> bool:
        """Whether ``ref``, made or taken over in ``session``, is a version of this trainer, too.

        A session resumes from a version of the one before and shares what led to it; of earlier ones nothing is known.
        """
        return session == self.session or (session == self.session - 1 and ref.version <= self.resumed_from)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Figures of one optimizer step, reduced over all ranks."""

    values: dict[str, float]
