"""The shared records of the package: frozen, slotted, keyword-only.

Shapes are written ``[T]`` (tokens of one sequence or of a packed batch) and ``[N]``
(sequences). Entry ``t`` of every per-token array describes token ``t``: ``logprobs[t]`` is
the log-probability of token ``t`` given the tokens before it, so entry 0 of a sequence
is meaningless and always masked (contract C10).

Example, one trajectory of a prompt of 3 tokens and an answer of 2::

    token_ids         p0  p1  p2  a0  a1
    loss_mask          0   0   0   1   1
    rollout_logprobs   0   0   0  -.2 -.7
    versions          -1  -1  -1   4   4
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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
    """Layout of LoRA on MoE experts: one adapter per expert, or one shared by a layer's experts."""

    PER_EXPERT = "per_expert"
    SHARED = "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """Structure of an adapter, without its weights.

    ``target_modules`` are Megatron names (``linear_qkv``, ``linear_proj``, ``linear_fc1``,
    ``linear_fc2``), with a scope prefix (``expert.linear_fc1``) if only some occurrences of the
    layer are selected (`families.targets`); the effective scale of B A is ``alpha / rank``.
    """

    name: str
    base_model: str
    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    expert_layout: ExpertLayout = ExpertLayout.PER_EXPERT
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Outcome(StrEnum):
    """End of a rollout. Only ``ok`` is trained on (contract C8)."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One problem: ``uid`` is stable across runs, ``answer`` is the gold text for the reward."""

    uid: str
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A server's result for one answer. The server reports ``versions`` token by token."""

    token_ids: list[int]  # [A]
    logprobs: list[float]  # [A]
    versions: list[int]  # [A]
    finish_reason: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Prompt, answers and the text between them as one sequence of T tokens, with reward and outcome.

    ``sample`` is the index of its sample in the group (0 to ``n_samples`` - 1). Several trajectories of one
    sample (an agent's conversations) have the same reward.
    """

    uid: str
    sample: int
    adapter: AdapterRef
    token_ids: list[int]  # [T]
    loss_mask: list[int]  # [T] 1 on the model's own tokens
    rollout_logprobs: list[float]  # [T] behaviour policy; 0 off the mask
    versions: list[int]  # [T] -1 off the mask
    reward: float
    outcome: Outcome = Outcome.OK
    finish_reason: str = "stop"
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """All trajectories of one (epoch, prompt): the unit of GRPO and of exactly-once consumption."""

    uid: str  # "<epoch>:<sample uid>"
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """N packed sequences; ``cu_seqlens[i]:cu_seqlens[i+1]`` are the tokens of sequence i.

    There is no padding outside the engines (contract C10). ``adapters[i]`` names the adapter of
    sequence i, ``group_ids[i]`` its prompt group, ``sample_ids[i]`` its sample. Sequences of one
    sample share its reward and thus its advantage.
    """

    token_ids: torch.Tensor  # [T] int64
    cu_seqlens: torch.Tensor  # [N+1] int64
    loss_mask: torch.Tensor  # [T] bool
    rollout_logprobs: torch.Tensor  # [T] fp32
    versions: torch.Tensor  # [T] int64
    rewards: torch.Tensor  # [N] fp32
    group_ids: torch.Tensor  # [N] int64
    sample_ids: torch.Tensor  # [N] int64
    adapters: tuple[str, ...]  # [N]
    prox_logprobs: torch.Tensor | None = None  # [T] fp32
    ref_logprobs: torch.Tensor | None = None  # [T] fp32
    advantages: torch.Tensor | None = None  # [T] fp32

    @property
    def n_sequences(self) -> int:
        return int(self.cu_seqlens.numel()) - 1

    @property
    def n_tokens(self) -> int:
        return int(self.token_ids.numel())


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardManifest:
    """Announcement of a publish (contract C3).

    ``layout`` is the digest of the ``weight_sync.layout.AdapterLayout`` in use: names, shapes,
    offsets, rank, alpha, targets. The tensors' fingerprints follow them on the wire.
    """

    run: str
    ref: AdapterRef
    parent: AdapterRef | None
    base_digest: str
    layout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Figures of one optimizer step, reduced over all ranks."""

    values: dict[str, float]
