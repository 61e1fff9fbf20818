"""The records of a run, the writer that stores them and the readers that get them back.

One JSON object per line in ``<run_folder>/metrics.jsonl``, told apart by ``kind``; rollout samples are in
files of their own, see `samples`. Every record names its adapter, so that several adapters of one run
stay separate. A float that is not finite is stored as ``null`` and read back as None.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from areal_lora.errors import ConfigError
from areal_lora.obs.metrics.samples import SampleFiles, cut_middle, sample_lines
from areal_lora.obs.metrics.tensorboard import TensorBoardSink
from areal_lora.obs.metrics.undone import BY_STEP, Mark, Undone
from areal_lora.run_folder.jsonl import JsonlSink, whole_lines

D = TypeVar("D")

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
TAIL_BYTES = 4 << 20
SEQUENCE = ("wire", "verify", "write", "commit_wait")
"""Phases of a publish that follow one another on the slowest server; ``wire`` includes waiting for the packing."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """One optimizer step of one adapter. Fractions are in [0, 1]; log-probabilities in nats.

    ``version`` is the version the step started from; ``staleness`` counts trained tokens by
    ``version - token version``; ``behaviour_mean_abs`` is mean |prox - rollout| logprob over
    trained tokens; ``mismatch_fresh`` the same over tokens of the very version that was trained,
    where only numerics differ, ``mismatch_stale`` over tokens of older ones. ``time_s`` is the wall
    time since the start of the run; ``step_s`` began when the version before was made, so handing that
    one over (checkpoint copy, publish join and pack) is in it. ``dropped`` (by reason),
    ``retried`` (by kind of fault), ``reissued`` and ``late`` (answers to a group that had gone on without
    them) count groups since the run began.
    ``servers_idle`` is the fraction of the time since the step before in which no group was in flight.
    ``audited_tokens`` were scored again by a server under the versions that sampled them, of this batch or the one
    before; ``audit_gap`` is the mean difference, ``unaudited_steps`` for how many batches in a row there were none.
    """

    step: int
    version: int
    time_s: float
    adapter: str = ""
    reward_mean: float | None = None
    reward_std: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    clip_fraction: float | None = None
    behaviour_mean_abs: float | None = None
    mismatch_fresh: float | None = None
    mismatch_stale: float | None = None
    kl: float | None = None
    entropy: float | None = None
    n_tokens: int = 0
    n_sequences: int = 0
    mean_answer_tokens: float | None = None
    staleness: dict[int, int] = {}
    step_s: float = 0.0
    wait_batch_s: float = 0.0
    annotate_s: float = 0.0
    train_s: float = 0.0
    checkpoint_join_s: float = 0.0
    checkpoint_copy_s: float = 0.0
    publish_join_s: float = 0.0
    publish_pack_s: float = 0.0
    rollout_tokens_per_s: float | None = None
    groups_ready: int = 0
    groups_running: int = 0
    groups_leased: int = 0
    groups_issued: int = 0
    groups_consumed: int = 0
    dropped: dict[str, int] = {}
    retried: dict[str, int] = {}
    reissued: int = 0
    late: int = 0
    servers_idle: float | None = None
    audited_tokens: int = 0
    audit_gap: float | None = None
    unaudited_steps: int = 0
    extra: dict[str, float | None] = {}

    @property
    def trainer_idle(self) -> float | None:
        """Fraction of the step in which the trainer waited for rollouts, disk or servers."""
        waited_s = self.wait_batch_s + self.checkpoint_join_s + self.publish_join_s
        return min(1.0, waited_s / self.step_s) if self.step_s else None


class PublishRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="publish"):
    """One adapter version that reached the servers.

    ``total_ms`` runs from the start on the trainer to the last server's acknowledgement.
    ``phases_ms`` may overlap; ``SEQUENCE`` names those that follow one another within the total.
    ``probe_*_abs`` is |logp trainer - logp server| over the probe tokens; None: not probed.
    ``servers`` serve the version; ``lost`` says by name why others were given up in this publish.
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

    def sequence_ms(self) -> dict[str, float]:
        """Phases that add up to ``total_ms``, in order; what no phase covers is ``other``."""
        parts = {name: self.phases_ms.get(name) or 0.0 for name in SEQUENCE}
        return {**parts, "other": max(0.0, (self.total_ms or 0.0) - sum(parts.values()))}


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="checkpoint"):
    """One checkpoint that was written beside the training, or could not be (``failed``)."""

    version: int
    write_s: float
    adapter: str = ""
    nbytes: int = 0
    failed: bool = False


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of an evaluation. ``reward`` is None if it could not be scored, ``correct`` too without a rule."""

    prompt: str
    completion: str
    gold: str
    reward: float | None
    correct: bool | None = None


class EvalRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="eval"):
    """Greedy answers of the policy ``version`` to ``n`` held-out problems, before ``step`` runs.

    ``accuracy`` is None where the task has no rule for what is correct. The ``unscored`` ones are not correct, and
    not in ``reward_mean``. ``left_out`` further problems have prompts that are too long; some are named.
    """

    version: int
    step: int
    accuracy: float | None
    n: int
    reward_mean: float | None = None
    unscored: int = 0
    left_out: int = 0
    left_out_first: list[str] = []
    adapter: str = ""
    tag: str = ""
    samples: list[SampleRecord] = []

    def figures(self) -> str:
        """``accuracy 0.250, mean reward 0.310 over 200 problems, 3 unscored``, without what was not measured."""
        values = {"accuracy": self.accuracy, "mean reward": self.reward_mean}
        measured = ", ".join(f"{name} {value:.3f}" for name, value in values.items() if value is not None)
        text = f"{measured} over {self.n} problems"
        text += f", {self.unscored} unscored" if self.unscored else ""
        if self.left_out:
            named = ", ".join(self.left_out_first) + (", ..." if self.left_out > len(self.left_out_first) else "")
            text += f", {self.left_out} left out (prompt too long: {named})"
        return text


class RolloutSampleRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="sample"):
    """One trained answer, kept for reading. ``versions`` are the policy versions that wrote it, sorted."""

    step: int
    prompt: str
    completion: str
    reward: float
    adapter: str = ""
    gold: str | None = None
    versions: list[int] = []


class ResumeRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="resume"):
    """The run goes on from ``version``, loaded from a checkpoint: what earlier records say of later ones is void."""

    version: int
    time_s: float
    adapter: str = ""


Record = StepRecord | PublishRecord | CheckpointRecord | EvalRecord | RolloutSampleRecord | ResumeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetrics:
    """All records of a run, in the order of steps and versions."""

    steps: list[StepRecord] = field(default_factory=list)
    publishes: list[PublishRecord] = field(default_factory=list)
    evals: list[EvalRecord] = field(default_factory=list)
    samples: list[RolloutSampleRecord] = field(default_factory=list)
    checkpoints: list[CheckpointRecord] = field(default_factory=list)
    resumes: list[ResumeRecord] = field(default_factory=list)


class MetricsWriter:
    """Stores records as JSONL and scalars for TensorBoard. One writer per run folder at a time."""

    def __init__(self, run_folder: Path | str) -> None:
        folder = Path(run_folder)
        self._encoder = msgspec.json.Encoder()
        self._jsonl = JsonlSink(folder / METRICS_FILE)
        self._samples = SampleFiles(folder)
        self._tensorboard = TensorBoardSink(folder / TENSORBOARD_FOLDER)

    def write(self, record: Record) -> None:
        """Append one record; it is in its file when this returns. Long texts of samples are cut in the middle."""
        match record:
            case RolloutSampleRecord():
                self._samples.write(self._encoder.encode(_shortened(record)))
            case EvalRecord():
                self._jsonl.write(self._encoder.encode(_shortened(record)))
            case ResumeRecord():
                self._samples.drop(record.adapter, record.version)
                self._jsonl.write(self._encoder.encode(record))
            case _:
                self._jsonl.write(self._encoder.encode(record))
        prefix = f"{record.adapter}/" if record.adapter else ""
        values = {prefix + name: value for name, value in _scalars(record).items()}
        if values:
            self._tensorboard.scalars(values, _clock(record))

    def close(self) -> None:
        self._jsonl.close()
        self._samples.close()
        self._tensorboard.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


T = TypeVar("T", RolloutSampleRecord, SampleRecord, EvalRecord)


def _shortened(record: T) -> T:
    if isinstance(record, EvalRecord):
        return msgspec.structs.replace(record, samples=[_shortened(sample) for sample in record.samples])
    texts = {name: getattr(record, name) for name in ("prompt", "completion", "gold")}
    return msgspec.structs.replace(record, **{name: text and cut_middle(text) for name, text in texts.items()})


def _clock(record: Record) -> int:
    return record.version if isinstance(record, PublishRecord | CheckpointRecord | ResumeRecord) else record.step


def _scalars(record: Record) -> dict[str, float | None]:
    """``{tag: value}`` of what is worth a TensorBoard curve."""
    match record:
        case StepRecord():
            values: dict[str, float | None] = {}
            for name, value in msgspec.structs.asdict(record).items():
                if isinstance(value, int | float) and name != "step":
                    is_time = name.endswith("_s") and not name.endswith("_per_s")
                    values[f"{'time' if is_time else 'train'}/{name}"] = value
            values["train/max_staleness"] = max(record.staleness, default=None)
            values["train/trainer_idle"] = record.trainer_idle
            values |= {f"dropped/{reason}": n for reason, n in record.dropped.items()}
            values |= {f"retried/{kind}": n for kind, n in record.retried.items()}
            return values | {f"extra/{name}": value for name, value in record.extra.items()}
        case PublishRecord():
            totals = {"publish/total_ms": record.total_ms, "publish/probe_mean_abs": record.probe_mean_abs}
            totals["publish/probe_max_abs"] = record.probe_max_abs
            return totals | {f"publish/{name}_ms": value for name, value in record.phases_ms.items()}
        case CheckpointRecord():
            return {"checkpoint/write_s": record.write_s, "checkpoint/mib": record.nbytes / 2**20}
        case EvalRecord():
            values = {"eval/accuracy": record.accuracy, "eval/reward_mean": record.reward_mean}
            return values | {"eval/unscored": record.unscored}
        case RolloutSampleRecord() | ResumeRecord():
            return {}


class MetricsTail:
    """Reads what was appended to a metrics file since the last call; a line still being written waits."""

    def __init__(self, run_folder: Path | str) -> None:
        self.path = Path(run_folder) / METRICS_FILE
        self._offset = 0
        self._lines = 0

    def read_new(self) -> list[Record]:
        """The next new whole records, about ``TAIL_BYTES`` of them at most: call it until nothing comes.

        Raises ConfigError with file and line for one that is not a record.
        """
        records: list[Record] = []
        if not self.path.exists():
            return records
        begin = self._offset
        with self.path.open("rb") as file:
            file.seek(begin)
            for line in file:
                if not line.endswith(b"\n") or self._offset - begin > TAIL_BYTES:
                    break
                self._offset += len(line)
                self._lines += 1
                records.append(_decode(_RECORD, line, self.path, self._lines))
        return records


def recorded_s(run_folder: Path | str) -> float:
    """The wall time of the last step recorded, undone ones included; 0 before the first."""
    return max((head.time_s for _, head in _heads(Path(run_folder)) if head.kind == "step"), default=0.0)


def iter_metrics(run_folder: Path | str) -> Iterator[Record]:
    """Everything recorded so far, one record at a time: those of ``metrics.jsonl`` in the order written, then samples.

    What a resumed run has undone is left out. So the file is read twice; what is appended meanwhile waits for
    the next call. Raises ConfigError with file and line for a line that is not a record.
    """
    folder = Path(run_folder)
    path, undone, end = folder / METRICS_FILE, Undone(), 0
    for number, (nbytes, head) in enumerate(_heads(folder), 1):
        undone.note(number, head.mark())
        end += nbytes
    if end:
        for number, line in enumerate(whole_lines(path, end), 1):
            record = _decode(_RECORD, line, path, number)
            if undone.nothing or undone.holds(number, _mark(record)):
                yield record
    for sample_path, number, line in sample_lines(folder):
        yield _decode(_RECORD, line, sample_path, number)


def read_metrics(run_folder: Path | str) -> RunMetrics:
    """All that `iter_metrics` gives, in memory; empty if nothing was recorded."""
    found = RunMetrics()
    samples: dict[tuple[str, int, str, str], RolloutSampleRecord] = {}
    for record in iter_metrics(run_folder):
        match record:
            case StepRecord():
                found.steps.append(record)
            case PublishRecord():
                found.publishes.append(record)
            case EvalRecord():
                found.evals.append(record)
            case RolloutSampleRecord():
                samples[record.adapter, record.step, record.prompt, record.completion] = record
            case CheckpointRecord():
                found.checkpoints.append(record)
            case ResumeRecord():
                found.resumes.append(record)
    found.steps.sort(key=_clock)
    found.publishes.sort(key=_clock)
    found.evals.sort(key=lambda e: (e.version, e.step))
    found.samples.extend(sorted(samples.values(), key=_clock))
    found.checkpoints.sort(key=_clock)
    return found


class _Head(msgspec.Struct, frozen=True):
    """The part of a record that a first pass looks at: cheaper to decode by far."""

    kind: str
    adapter: str = ""
    step: int = 0
    version: int = 0
    tag: str = ""
    time_s: float = 0.0

    def mark(self) -> Mark:
        index = self.step if self.kind in BY_STEP else self.version
        return Mark(kind=self.kind, adapter=self.adapter, index=index, what=_what(self.kind, self.tag))


def _mark(record: Record) -> Mark:
    kind = str(record.__struct_config__.tag)
    index = record.step if isinstance(record, StepRecord | RolloutSampleRecord) else record.version
    return Mark(
        kind=kind,
        adapter=record.adapter,
        index=index,
        what=_what(kind, record.tag if isinstance(record, EvalRecord) else ""),
    )


def _what(kind: str, tag: str) -> str | None:
    """A step has several samples, a version one evaluation of each tag, and one of everything else."""
    return None if kind == "sample" else tag if kind == "eval" else ""


_RECORD = msgspec.json.Decoder(Record)
_HEAD = msgspec.json.Decoder(_Head)


def _heads(folder: Path) -> Iterator[tuple[int, _Head]]:
    """(bytes of the line, head) of every record of ``metrics.jsonl``."""
    path = folder / METRICS_FILE
    if path.exists():
        for number, line in enumerate(whole_lines(path), 1):
            yield len(line), _decode(_HEAD, line, path, number)


def _decode(decoder: msgspec.json.Decoder[D], line: bytes, path: Path, number: int) -> D:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError as error:
        fix = "restore the file or move it away"
        raise ConfigError(f"{path}:{number}", f"not a metrics record: {error}", fix) from error
