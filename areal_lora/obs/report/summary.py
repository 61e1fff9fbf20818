"""The figures of a run and of each adapter: read one record at a time, written as ``summary.json``, shown on a card.

Memory grows by four numbers per version, which the medians need.
"""

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_lora.config import recorded
from areal_lora.config.models import Config
from areal_lora.obs.metrics import records
from areal_lora.obs.metrics.reader import iter_metrics, read_metrics
from areal_lora.obs.run_view import newest_state
from areal_lora.run_folder.events import count_requeues, count_restarts
from areal_lora.run_folder.paths import RunFolder, write_file
from areal_lora.types import AdapterPhase, AdapterRef


def _largest(*values: float | None) -> float | None:
    return max((v for v in values if v is not None), default=None)


class Figures:
    """``add`` valid records (`iter_metrics`) of one adapter, or of all, in any order of steps and versions."""

    def __init__(self) -> None:
        self.steps = 0
        self.last_step: records.StepRecord | None = None
        self.last_by_adapter: dict[str, records.StepRecord] = {}
        """The latest step of each adapter; it holds the counts since the start."""
        self.staleness: Counter[int] = Counter()
        """Trained tokens by versions of lag."""
        self.trained_tokens = 0
        self.speeds = array("d")
        self.publishes = 0
        self.publishes_probed = 0
        self.publish_ms = array("d")
        self.probe_max_abs: float | None = None
        self.probe_mean_abs: float | None = None
        self.checkpoint_bytes: dict[str, int] = {}
        self.checkpoints_failed: Counter[str] = Counter()
        self.resumes: list[records.ResumeRecord] = []
        self.recorded: records.AdapterStateRecord | None = None
        """The newest state since the last resume."""
        self.best_eval: records.EvalRecord | None = None
        """Of the first set and its newest measure: highest accuracy, then highest mean reward, then newest version."""
        self.evals: list[records.EvalRecord] = []
        """The first and last evaluation of the first set without samples; fewer if the run has fewer."""
        self.sets: dict[tuple[str, str], list[records.EvalRecord]] = {}
        """By adapter and name of a set: its first and last evaluation without samples, one if there is one."""

    @property
    def max_staleness(self) -> int | None:
        return max((lag for lag, n in self.staleness.items() if n), default=None)

    @property
    def mean_lag(self) -> float | None:
        return records.mean_lag(self.staleness)

    def add(self, record: records.Record) -> None:
        match record:
            case records.StepRecord():
                self.steps += record.taken
                self.trained_tokens += record.trained_tokens
                if self.last_step is None or record.time_s >= self.last_step.time_s:
                    self.last_step = record
                self.last_by_adapter[record.adapter] = record
                self.staleness.update(record.staleness)
                if (rate := record.metrics.get("train/rollout_tokens_per_s")) is not None:
                    self.speeds.append(rate)
            case records.PublishRecord():
                self.publishes += 1
                self.publishes_probed += record.probe_max_abs is not None
                if record.total_ms is not None:
                    self.publish_ms.append(record.total_ms)
                self.probe_max_abs = _largest(self.probe_max_abs, record.probe_max_abs)
                self.probe_mean_abs = _largest(self.probe_mean_abs, record.probe_mean_abs)
            case records.EvalRecord():
                bare = msgspec.structs.replace(record, samples=[])
                key = (record.adapter, record.name)
                self.sets[key] = _ends([*self.sets.get(key, ()), bare])
                if record.order == 0:
                    self.evals = _ends([*self.evals, bare])
                    known = [self.best_eval] if self.best_eval and self.best_eval.measure in ("", bare.measure) else []
                    self.best_eval = max([*known, bare], key=_quality)
            case records.CheckpointRecord(failed=True):
                self.checkpoints_failed[record.adapter] += 1
            case records.CheckpointRecord():
                self.checkpoint_bytes[record.adapter] = record.nbytes
            case records.ResumeRecord():
                self.resumes.append(record)
                self.recorded = None
            case records.AdapterStateRecord():
                self.recorded = record


class RunFigures:
    """Figures of the run in ``total``, of each of ``adapters`` by name. A record without a name is of the only one."""

    def __init__(self, adapters: Sequence[str]) -> None:
        self.total = Figures()
        self.adapters = {name: Figures() for name in adapters}

    def add(self, record: records.Record) -> None:
        self.total.add(record)
        only = next(iter(self.adapters)) if len(self.adapters) == 1 else ""
        if (figures := self.adapters.get(record.adapter or only)) is not None:
            figures.add(record)

    def share(self, name: str) -> float:
        """The adapter's part of all trained tokens; 0 before the first step."""
        tokens = self.total.trained_tokens
        return self.adapters[name].trained_tokens / tokens if tokens else 0.0


def _quality(record: records.EvalRecord) -> tuple[float, float, int]:
    accuracy, reward = (-math.inf if v is None else v for v in (record.accuracy, record.reward_mean))
    return accuracy, reward, record.version


def _ends(found: list[records.EvalRecord]) -> list[records.EvalRecord]:
    """The first and the last one."""
    ordered = sorted(found, key=lambda e: (e.version, e.step))
    return [ordered[0], ordered[-1]] if len(ordered) > 1 else ordered


class AdapterSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one adapter of several. None: not measured.

    ``steps_wanted`` are its training steps, None where a client drives it. ``reason`` explains its ``state``,
    empty where that explains itself. ``share`` is its part of the trained tokens of the run. Evaluations are those of
    the first set: the first, the last and the best one (`Figures.best_eval`). ``path`` is its exported folder, if any.
    """

    state: AdapterPhase
    reason: str
    steps: int
    steps_wanted: int | None
    trained_tokens: int
    share: float
    eval_first: float | None
    eval_last: float | None
    eval_best: float | None
    eval_reward_first: float | None
    eval_reward_last: float | None
    eval_reward_best: float | None
    best_version: int | None
    max_staleness: int | None
    max_staleness_allowed: int
    path: str | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a run. None: not measured.

    ``eval_before`` and ``eval_after`` are greedy accuracies of the first and last evaluation; None if there was only
    one, or the task has no rule for correctness. ``eval_reward_*`` are the mean rewards of both. With several adapters
    these four and ``adapter_path`` are None: ``adapters`` has them by name. With one it is empty, absent from the file.
    ``eval_problems``, ``eval_unscored`` and ``eval_left_out`` count the last evaluation's problems, unscored answers
    and over-long prompts. All these are of the first set, and sums over the adapters. ``eval_sets`` has the figures of
    the last evaluation of every set by its name (`EvalRecord.scalars`), after the adapter's name if there are several.
    ``probe_*_abs_dlogp`` are the largest values over all publishes of largest and mean |logp trainer - logp server|.
    ``staleness_histogram`` counts trained tokens by versions of lag, of which ``max_staleness`` is the largest.
    ``restarts`` counts by process, of which ``trainer`` is all ranks together; ``requeues`` those of Slurm jobs.
    """

    run: str
    model: str
    seed: int
    config_sha256: str
    steps: int
    wall_s: float
    eval_before: float | None
    eval_after: float | None
    eval_reward_before: float | None = None
    eval_reward_after: float | None = None
    eval_problems: int = 0
    eval_unscored: int = 0
    eval_left_out: int = 0
    eval_sets: dict[str, dict[str, float]] = {}
    publishes: int
    publishes_probed: int
    probe_max_abs_dlogp: float | None
    probe_mean_abs_dlogp: float | None
    staleness_histogram: dict[int, int]
    max_staleness: int | None
    mean_lag: float | None = None
    max_staleness_allowed: int
    dropped: dict[str, int]
    restarts: dict[str, int] = {}
    requeues: int = 0
    adapters: dict[str, AdapterSummary] = {}
    adapter_path: str | None
    report_path: str

    def steps_of(self, adapter: str) -> int:
        if not self.adapters:
            return self.steps
        return self.adapters[adapter].steps if adapter in self.adapters else 0

    def values(self) -> dict[str, Any]:
        """The figures as in the file."""
        values: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return {key: value for key, value in values.items() if key != "adapters" or value}


def write_summary(
    run_folder: RunFolder, *, wall_s: float, adapters: Mapping[str, Path | str], report_path: Path | str
) -> Path:
    """Write ``summary.json`` from the metrics and the resolved configuration of the run folder.

    ``adapters`` are the exported folders by adapter.
    """
    config = recorded.with_joined(recorded.read_config(run_folder), run_folder)
    runs = recorded.adapter_runs(config)
    of_run = RunFigures(list(runs))
    for record in iter_metrics(run_folder):
        of_run.add(record)
    figures, several = of_run.total, len(runs) != 1
    dropped: Counter[str] = Counter()
    for step in figures.last_by_adapter.values():
        dropped.update(step.dropped)
    lasts = [one.evals[-1] for one in of_run.adapters.values() if one.evals]
    first, last = (None, None) if several else _first_and_last(figures)
    many = len({adapter for adapter, _ in figures.sets}) > 1
    sets = {
        f"{adapter}/{name}" if many else name: {
            figure: value for figure, value in found[-1].scalars().items() if value is not None
        }
        for (adapter, name), found in sorted(figures.sets.items())
    }
    parts = {
        name: _adapter_summary(run, of_run.adapters[name], of_run.share(name), adapters.get(name))
        for name, run in runs.items()
    }
    summary = Summary(
        run=config.run.name,
        model=config.model.path,
        seed=config.run.seed,
        config_sha256=recorded.config_digest(run_folder),
        steps=figures.steps,
        wall_s=round(wall_s, 3),
        eval_before=first.accuracy if first else None,
        eval_after=last.accuracy if last else None,
        eval_reward_before=first.reward_mean if first else None,
        eval_reward_after=last.reward_mean if last else None,
        eval_problems=sum(e.n for e in lasts),
        eval_unscored=sum(e.unscored for e in lasts),
        eval_left_out=sum(e.left_out for e in lasts),
        eval_sets=sets,
        publishes=figures.publishes,
        publishes_probed=figures.publishes_probed,
        probe_max_abs_dlogp=figures.probe_max_abs,
        probe_mean_abs_dlogp=figures.probe_mean_abs,
        staleness_histogram=dict(sorted(figures.staleness.items())),
        max_staleness=figures.max_staleness,
        mean_lag=None if figures.mean_lag is None else round(figures.mean_lag, 4),
        max_staleness_allowed=max((run.max_staleness for run in runs.values()), default=0),
        dropped=dict(sorted(dropped.items())),
        restarts=count_restarts(run_folder),
        requeues=count_requeues(run_folder),
        adapters=parts if several else {},
        adapter_path=None if several else next(map(str, adapters.values()), None),
        report_path=str(report_path),
    )
    write_file(run_folder.summary, msgspec.json.format(msgspec.json.encode(summary.values()), indent=2) + b"\n")
    return run_folder.summary


def _first_and_last(figures: Figures) -> tuple[records.EvalRecord | None, records.EvalRecord | None]:
    """Two different evaluations; None for what is missing."""
    evals = figures.evals
    return (evals[0] if evals else None), (evals[-1] if len(evals) > 1 else None)


def _adapter_summary(
    run: recorded.AdapterRun, figures: Figures, share: float, path: Path | str | None
) -> AdapterSummary:
    (first, last), best = _first_and_last(figures), figures.best_eval
    return AdapterSummary(
        state=newest_state(figures.recorded, figures.steps, run.end),
        reason=figures.recorded.reason if figures.recorded else "",
        steps=figures.steps,
        steps_wanted=run.end,
        trained_tokens=figures.trained_tokens,
        share=round(share, 4),
        eval_first=first.accuracy if first else None,
        eval_last=last.accuracy if last else None,
        eval_best=best.accuracy if best else None,
        eval_reward_first=first.reward_mean if first else None,
        eval_reward_last=last.reward_mean if last else None,
        eval_reward_best=best.reward_mean if best else None,
        best_version=best.version if best else None,
        max_staleness=figures.max_staleness,
        max_staleness_allowed=run.max_staleness,
        path=None if path is None else str(path),
    )


def read_summary(run_folder: RunFolder | Path | str) -> Summary:
    """Read ``summary.json``; inverse of ``write_summary``. Paths in a folder that was moved are those of its place."""
    folder = RunFolder.of(run_folder)
    summary = msgspec.json.decode(folder.summary.read_bytes(), type=Summary)
    written, here = Path(summary.report_path).parent, folder.path.absolute()

    def moved(path: str | None) -> str | None:
        inside = path is not None and written.is_absolute() and Path(path).is_relative_to(written)
        return str(here / Path(path).relative_to(written)) if path and inside else path

    replace = msgspec.structs.replace
    adapters = {name: replace(part, path=moved(part.path)) for name, part in summary.adapters.items()}
    report = moved(summary.report_path)
    return replace(summary, report_path=report, adapter_path=moved(summary.adapter_path), adapters=adapters)


def model_card(folder: RunFolder, config: Config, ref: AdapterRef, base: str, repo: str) -> str:
    """Markdown with the hub's metadata: what was trained on what, and how it measures. No paths of this machine."""
    adapter = recorded.adapter_named(config, ref.name)
    run = recorded.adapter_run(config, adapter)
    metrics = read_metrics(folder)
    evals = {
        record.name: record
        for record in metrics.evals
        if record.adapter in ("", ref.name) and record.version == ref.version
    }
    weights = adapter.reward_weights or [1.0] * len(adapter.rewards)
    rewards = ", ".join(
        f"`{reward.kind}`" + (f" x {weight:g}" if len(weights) > 1 else "")
        for reward, weight in zip(adapter.rewards, weights, strict=True)
    )
    kind = "rsLoRA" if adapter.rslora else "LoRA"
    rows = [
        ("base model", base),
        ("adapter", f"{kind}, rank {adapter.rank}, alpha {adapter.alpha:g}, on {', '.join(adapter.target_modules)}"),
        ("version", f"{ref.version}{'' if run.endless else f' of {run.steps} steps'}, seed {run.seed}"),
        ("algorithm", f"`{adapter.algorithm.kind}`, reward {rewards}"),
        ("task", f"`{adapter.task.kind}`"),
        ("samples", f"{adapter.sampling.prompts_per_step} prompts x {adapter.sampling.n_samples} answers a step"),
    ]
    table = "".join(f"| {name} | {value} |\n" for name, value in rows)
    found = "".join(f"- {name}: {record.figures()}\n" for name, record in evals.items()) or "- not evaluated\n"
    return (
        f"---\nbase_model: {base}\nlibrary_name: peft\ntags:\n- lora\n- reinforcement-learning\n---\n\n"
        f"# {ref.name}\n\nA LoRA adapter trained with reinforcement learning by areal_lora.\n\n"
        f"| | |\n|---|---|\n{table}\n## Evaluation\n\n{found}\n"
        f"## Use\n\n```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{repo}")\n```\n'
    )
