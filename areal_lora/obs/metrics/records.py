"""Record types of a run. `writer` appends records to the run folder, `reader` returns them.

``metrics.jsonl`` holds one JSON object per line; ``kind`` names the record type. Rollouts have files of their own
(`rollout_store`). Every record names its adapter. A float that is not finite is stored as ``null``, read as None.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from areal_lora.config.sections.task import DEFAULT_SET
from areal_lora.types import AdapterPhase, TrajectoryGroup


def mean_lag(staleness: Mapping[int, int]) -> float | None:
    """Return the mean of a staleness histogram (tokens by versions of lag); None if it is empty."""
    tokens = sum(staleness.values())
    return sum(lag * n for lag, n in staleness.items()) / tokens if tokens else None


def faults_text(retried: Mapping[str, int], dropped: Mapping[str, int], last: Mapping[str, str]) -> str:
    """``scorer: 70 retried, 6 dropped, last: TypeError: ... (reward.py:9)`` for each kind of fault in ``last``."""
    return "; ".join(
        f"{kind}: {retried.get(kind, 0)} retried, {dropped.get(kind, 0)} dropped, last: {detail}"
        for kind, detail in last.items()
    )


def lag_counts(steps: "Iterable[StepRecord]") -> dict[int, int]:
    """Trained tokens of ``steps`` by versions of lag, ascending."""
    counts: Counter[int] = Counter()
    for step in steps:
        counts.update(step.staleness)
    return dict(sorted(counts.items()))


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """One optimizer step of one adapter.

    ``version`` is the version the step started from, ``time_s`` the wall time since the start of the run.
    ``step_s`` starts with the previous version and includes its checkpoint copy, publish join and pack; ``spans`` are
    the seconds of its phases by name, with what the trainer waited for other adapters meanwhile.
    ``staleness`` counts trained tokens by ``version - token version``.
    ``dropped`` (by reason) and ``retried`` (by kind of fault) count groups since the start of the run; ``faults`` has
    the last fault of each kind since the controller started.
    ``by_client`` marks the step of a client. There ``version`` is the number of an operation, ``step`` counts the
    optimizer's steps, which a state that is loaded sets, ``n_targets`` are the tokens whose weight is not 0, and
    what belongs to rollouts is not known. ``taken`` is false after a gradient that was not finite: it does not count.
    ``metrics`` are the measured figures by tag, such as ``train/loss``: `trainer.step_metrics` defines them, and
    TensorBoard and trackers show them under these tags. None: not finite.
    """

    step: int
    version: int
    time_s: float
    adapter: str = ""
    step_s: float = 0.0
    spans: dict[str, float] = {}
    staleness: dict[int, int] = {}
    dropped: dict[str, int] = {}
    retried: dict[str, int] = {}
    faults: dict[str, str] = {}
    by_client: bool = False
    taken: bool = True
    n_targets: int = 0
    metrics: dict[str, float | None] = {}

    @property
    def reward_mean(self) -> float | None:
        return self.metrics.get("train/reward_mean")

    @property
    def reward_components(self) -> dict[str, float]:
        """Means of the reward's named parts."""
        prefix, found = "reward/", self.metrics.items()
        return {tag.removeprefix(prefix): x for tag, x in found if x is not None and tag.startswith(prefix)}

    @property
    def flat(self) -> bool:
        """Whether nothing moved the adapter: the rewards of each group were equal, or all samples were masked."""
        return self.metrics.get("train/grad_norm") == 0.0

    @property
    def faults_text(self) -> str:
        return faults_text(self.retried, self.dropped, self.faults)

    @property
    def trained_tokens(self) -> int:
        """Tokens that this step was trained on: those of answers, or a client's targets."""
        return self.n_targets if self.by_client else sum(self.staleness.values())

    @property
    def mean_lag(self) -> float | None:
        """Mean staleness of the trained tokens, in versions."""
        return mean_lag(self.staleness)

    @property
    def trainer_idle(self) -> float | None:
        """Fraction of the step spent waiting for rollouts, disk or servers; no one waits for those of a client."""
        if self.by_client:
            return None
        waited_s = sum(self.spans.get(name, 0.0) for name in ("wait_batch", "checkpoint_join", "publish_join"))
        return min(1.0, waited_s / self.step_s) if self.step_s else None


class PublishRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="publish"):
    """One adapter version that reached the servers.

    ``total_ms`` is the time from the start on the trainer to the last acknowledgement.
    ``phases_ms`` are those of the slowest server; they may overlap.
    ``probe_*_abs`` is |logp trainer - logp server| over the probe tokens; None: not probed.
    ``servers`` counts the servers of the version; ``lost`` maps each server excluded by this publish to the reason.
    ``merge_*``: what the cast to the serving dtype left of a merged adapter (`CastSums`); None if it was not merged.
    ``probe_mean_abs``: without the sequence of a routed model that may hold a tie (`ProbeResult.compared`).
    """

    version: int
    total_ms: float | None
    adapter: str = ""
    phases_ms: dict[str, float | None] = {}
    nbytes: int = 0
    probe_mean_abs: float | None = None
    probe_max_abs: float | None = None
    differs_from_base: bool = False
    servers: int = 0
    lost: dict[str, str] = {}
    merge_survives: float | None = None
    merge_error: float | None = None
    merge_unmoved: float | None = None


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="checkpoint"):
    """One checkpoint written in the background; ``failed``: not written."""

    version: int
    write_s: float
    adapter: str = ""
    nbytes: int = 0
    failed: bool = False


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of an evaluation. ``reward`` is None: not scored. ``correct`` is None: not scored, or no rule."""

    prompt: str
    completion: str
    gold: str
    reward: float | None
    correct: bool | None = None


class Estimates(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of answers; fractions are in [0, 1]. None where there is no rule for what is correct, or no reward.

    ``accuracy`` is the fraction of all answers that are correct. ``reward_mean`` is over the scored answers;
    ``unscored`` ones are not correct and have no reward (contract C8). ``accuracy_95`` and ``reward_95`` are 95 %
    intervals; ``interval`` is the method of the first, ``wilson``, before also ``bootstrap``. ``pass_at`` is pass@k by
    k, ``majority`` majority@n_samples; both are of several answers only. ``answer_tokens`` is the mean number of
    sampled tokens, ``truncated`` the share of answers ended by their length.
    """

    accuracy: float | None = None
    reward_mean: float | None = None
    unscored: int = 0
    accuracy_95: tuple[float, float] | None = None
    reward_95: tuple[float, float] | None = None
    interval: str = ""
    pass_at: dict[int, float] = {}
    majority: float | None = None
    answer_tokens: float | None = None
    truncated: float | None = None


class EvalRecord(Estimates, frozen=True, kw_only=True, tag_field="kind", tag="eval"):
    """Answers of the policy ``version`` to ``n`` held-out problems of the set ``name``, before ``step`` runs.

    ``order`` is the set's place in the configuration; the first one is 0. ``measure`` is a digest of what is measured:
    problems, sampling, workflow and reward. There are ``n_samples`` answers per problem. ``left_out`` counts further
    problems whose prompts are too long.
    ``measured_with``: another adapter whose version 0, the base as well, was evaluated for both; ``wall_s`` is 0 then.
    """

    version: int
    step: int
    n: int
    name: str = DEFAULT_SET
    measure: str = ""
    order: int = 0
    n_samples: int = 1
    temperature: float = 0.0
    left_out: int = 0
    left_out_first: list[str] = []
    wall_s: float | None = None
    measured_with: str = ""
    adapter: str = ""
    tag: str = ""
    samples: list[SampleRecord] = []

    def figures(self) -> str:
        """``accuracy 0.250, mean reward 0.310 over 200 problems, 3 unscored``; unmeasured values are omitted."""
        values = {"accuracy": self.accuracy, "mean reward": self.reward_mean}
        values |= {f"pass@{k}": value for k, value in self.pass_at.items() if k > 1}
        values[f"majority@{self.n_samples}"] = self.majority
        measured = ", ".join(f"{name} {value:.3f}" for name, value in values.items() if value is not None)
        text = f"{measured} over {self.n} problems"
        text += f", {self.unscored} unscored" if self.unscored else ""
        if self.left_out:
            named = ", ".join(self.left_out_first) + (", ..." if self.left_out > len(self.left_out_first) else "")
            text += f", {self.left_out} left out (prompt too long: {named})"
        return text + (f", measured with {self.measured_with}" if self.measured_with else "")

    def scalars(self) -> dict[str, float | None]:
        """Figures by name, as TensorBoard has them."""
        values = {"accuracy": self.accuracy, "reward_mean": self.reward_mean, "unscored": float(self.unscored)}
        values |= {f"pass@{k}": value for k, value in self.pass_at.items()}
        values |= {"majority": self.majority, "answer_tokens": self.answer_tokens, "truncated": self.truncated}
        return values


class GroupText(msgspec.Struct, frozen=True, kw_only=True):
    """What people read of a group of rollouts: the whole prompt as the model got it, its messages as JSON, the answers.

    ``answers`` are those of the group's trajectories, ``turns`` the messages of each as JSON. ``tries`` counts the
    requests for answers to this prompt, those that failed or whose answers came too late among them.
    """

    prompt: str
    answers: tuple[str, ...]
    turns: tuple[str, ...] = ()
    messages: str = ""
    gold: str = ""
    tries: int = 1


class DroppedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that is not trained on. ``reason`` is one of `StepRecord.dropped`, with the last fault of a failed group.

    Where it has no answers there is one trajectory, of the prompt alone.
    """

    reason: str
    group: TrajectoryGroup
    text: GroupText


class ResumeRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="resume"):
    """The run resumed from checkpoint ``version``: earlier records of later versions are void."""

    version: int
    time_s: float
    adapter: str = ""


class MembersRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="members"):
    """The rollout servers changed: from now on ``servers`` serve ``version``.

    ``joined`` and ``left`` (in order) are names; ``lost`` maps each excluded server to the reason. The publish that
    reached them took ``publish_ms``, from its start on the trainer to the last acknowledgement; where servers joined
    without a new version it is recorded nowhere else.
    """

    version: int
    servers: int
    joined: list[str] = []
    left: list[str] = []
    lost: dict[str, str] = {}
    publish_ms: float | None = None
    adapter: str = ""
    time_s: float = 0.0


class AdapterStateRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="state"):
    """An adapter is in ``state`` from now on, ``time_s`` seconds after the start of the run, at its ``version``.

    ``reason`` is empty where the state explains itself. A resume of the adapter ends the state. ``steps`` are
    the training steps of an adapter that joined; None if the configuration states them, or a client decides.
    """

    adapter: str
    state: AdapterPhase
    version: int
    reason: str = ""
    time_s: float = 0.0
    steps: int | None = None


Record = StepRecord | PublishRecord | CheckpointRecord | EvalRecord | ResumeRecord | MembersRecord | AdapterStateRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetrics:
    """All records of a run, in the order of steps and versions."""

    steps: list[StepRecord] = field(default_factory=list)
    publishes: list[PublishRecord] = field(default_factory=list)
    evals: list[EvalRecord] = field(default_factory=list)
    checkpoints: list[CheckpointRecord] = field(default_factory=list)
    resumes: list[ResumeRecord] = field(default_factory=list)
    members: list[MembersRecord] = field(default_factory=list)
    states: list[AdapterStateRecord] = field(default_factory=list)


def position(record: Record) -> int:
    """The x axis of a record: the step of steps and evaluations, the version of every other record."""
    return record.step if isinstance(record, StepRecord | EvalRecord) else record.version


def scalars(record: Record) -> dict[str, float]:
    """``{tag: value}`` with the adapter's name before each; what was not measured or is not finite has no entry.

    Their x axis is `records.position`.
    """
    prefix = f"{record.adapter}/" if record.adapter else ""
    values = figures(record).items()
    return {prefix + name: value for name, value in values if value is not None and math.isfinite(value)}


def figures(record: Record) -> dict[str, float | None]:
    """What a record measured, by tag."""
    match record:
        case StepRecord():
            values = {f"time/{name}_s": seconds for name, seconds in record.spans.items()} | record.metrics
            values |= {"time/time_s": record.time_s, "time/step_s": record.step_s, "train/version": record.version}
            values["train/max_staleness"] = max(record.staleness, default=None)
            values["train/mean_lag"] = record.mean_lag
            values["train/trainer_idle"] = record.trainer_idle
            values |= {"train/n_targets": record.n_targets} if record.by_client else {}
            values |= {f"dropped/{reason}": n for reason, n in record.dropped.items()}
            return values | {f"retried/{kind}": n for kind, n in record.retried.items()}
        case PublishRecord():
            totals = {"publish/total_ms": record.total_ms, "publish/probe_mean_abs": record.probe_mean_abs}
            totals["publish/probe_max_abs"] = record.probe_max_abs
            return totals | {f"publish/{name}_ms": value for name, value in record.phases_ms.items()}
        case CheckpointRecord():
            return {"checkpoint/write_s": record.write_s, "checkpoint/mib": record.nbytes / 2**20}
        case EvalRecord():
            found = record.scalars()
            main = ("accuracy", "reward_mean", "unscored") if record.order == 0 else ()
            return {f"eval/{name}": found[name] for name in main} | {
                f"eval/{record.name}/{name}": value for name, value in found.items()
            }
        case MembersRecord():
            return {"servers/members": record.servers}
        case AdapterStateRecord():
            return {"state": float(list(AdapterPhase).index(record.state))}  # trackers have numbers only
        case ResumeRecord():
            return {}
