"""A sweep: settings of one adapter compared in one run, on the same prompts and servers, by successive halving.

    overrides with lists -- `plan_sweep` --> a trial per combination of values, rungs         (pure)
    rung reached by all  -- `decide` -->     RUN/sweep.json -- `desired` --> RUN/desired.json

A trial is an adapter that joins and leaves by the desired state (`trainer.collective.joining`). A decision is recorded
before it has an effect: a launcher that starts again makes none of them twice, and writes the same desired state.
"""

import itertools
import math
import re
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from fractions import Fraction
from typing import Any, Self

import msgspec
import yaml
from rich.console import Console
from rich.table import Table

from areal_lora.config.load import load_config, parse_override
from areal_lora.config.models import Config
from areal_lora.config.recorded import adapter_run
from areal_lora.config.sections.run import ServiceConfig
from areal_lora.errors import ConfigError
from areal_lora.obs.console import LiveConsole, number, print_line
from areal_lora.obs.metrics import records as r
from areal_lora.obs.metrics.reader import iter_metrics
from areal_lora.obs.report.summary import read_summary
from areal_lora.run_folder import paths as state
from areal_lora.run_folder.paths import RunFolder, write_file
from areal_lora.types import AdapterPhase

SHARED = ("name", "steps", "seed", "task", "workflow")
"""Keys of an adapter that decide prompts and rungs: the same in all trials."""


class Measure(StrEnum):
    """``reward``: mean of the newer half of the steps since the rung before. ``evaluation``: accuracy of the newest
    evaluation of the first set, or its mean reward where the task has no rule for correctness."""

    REWARD = "reward"
    EVALUATION = "evaluation"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of values. ``adapter`` is its entry of ``adapters`` without the name."""

    name: str
    overrides: tuple[str, ...]
    adapter: dict[str, Any]

    def desired(self, phase: state.DesiredPhase) -> state.DesiredAdapter:
        return state.DesiredAdapter(name=self.name, incarnation=1, phase=phase, adapter=self.adapter)

    @property
    def key(self) -> str:
        """The name of its adapter in the run."""
        return self.desired(state.DesiredPhase.ACTIVE).key


class Rung(msgspec.Struct, frozen=True):
    """Once all remaining trials have made ``step`` steps, ``keep`` of them continue."""

    step: int
    keep: int


class RungDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What a rung has decided. ``scores`` are those of the trials that reached it, by key; None: failed or unknown."""

    step: int
    scores: dict[str, float | None]
    stopped: tuple[str, ...]


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """The plan and its decisions so far, as in ``RUN/sweep.json``.

    ``command`` starts a run of one trial, without its overrides. ``repeats``: with the same bits (`deterministic`).
    """

    command: tuple[str, ...]
    repeats: bool
    by: Measure
    trials: tuple[Trial, ...]
    rungs: tuple[Rung, ...]
    decisions: tuple[RungDecision, ...] = ()

    @property
    def remaining(self) -> tuple[str, ...]:
        """Keys of the trials that no decision has stopped, in the order of the plan."""
        stopped = {key for decision in self.decisions for key in decision.stopped}
        return tuple(trial.key for trial in self.trials if trial.key not in stopped)

    def with_decision(self, decision: RungDecision) -> Self:
        return msgspec.structs.replace(self, decisions=(*self.decisions, decision))


def plan_sweep(
    files: Sequence[str], overrides: Sequence[str], *, rungs: str = "", by: Measure = Measure.REWARD
) -> tuple[Config, Sweep]:
    """The configuration with a listed adapter per trial, and the sweep.

    Of ``overrides`` those of an adapter's keys with a list have a value per trial. ``rungs`` are parts of the steps,
    such as ``1/4,1/2``, if not those of `plan_rungs`. Raises ConfigError for trials that could not be compared.
    """
    swept, shared = dict[str, list[str]](), []
    for text in overrides:
        (key, _), raw = parse_override(text), text.partition("=")[2]
        if key.startswith("adapters.") and isinstance(node := yaml.compose(raw, yaml.SafeLoader), yaml.SequenceNode):
            # As they are written: 1e-4 keeps its name.
            swept[key] = [raw[item.start_mark.index : item.end_mark.index] for item in node.value]
        else:
            shared.append(text)
    combinations = list(itertools.product(*([f"{key}={v}" for v in values] for key, values in swept.items())))
    configs = [load_config(files, [*shared, *own]) for own in combinations]
    different = len({config.model_dump_json() for config in configs})  # 1e-4 and 0.0001 are one value
    if different < max(2, len(configs)):
        reason = f"the lists of values give {different} different combinations of {len(configs)}"
        raise ConfigError("sweep", reason, "give lists of different values: adapters.0.optimizer.lr=[1e-4,3e-4]")
    first = configs[0]
    if len(first.adapters) != 1 or first.service is not None:
        raise ConfigError("adapters", "a sweep has one adapter and no service", "give a configuration of such a run")
    for key in SHARED:
        if any(getattr(config.adapters[0], key) != getattr(first.adapters[0], key) for config in configs):
            raise ConfigError(f"adapters.0.{key}", "trials share it, so that they compare", "give it one value")
    names = _names(combinations)
    trials = [
        Trial(name=name, overrides=own, adapter=config.adapters[0].model_dump(mode="json", exclude={"name"}))
        for name, own, config in zip(names, combinations, configs, strict=True)
    ]
    settings, every = adapter_run(first, first.adapters[0]), first.eval.every_steps
    if by is Measure.EVALUATION and not every:
        raise ConfigError("eval.every_steps", "0: no version is evaluated before the last", "set it, or leave out --by")
    every, earliest = (every, 1) if by is Measure.EVALUATION else (1, settings.max_staleness + 2)
    sweep = Sweep(
        command=("train", *(word for file in files for word in ("--config", file)), *shared),
        repeats=first.rollout.deterministic,
        by=by,
        trials=tuple(trials),
        rungs=plan_rungs(len(trials), settings.steps, _fractions(rungs), every, earliest),
    )
    listed = [c.adapters[0].model_copy(update={"name": name}) for name, c in zip(names, configs, strict=True)]
    return first.model_copy(update={"adapters": listed}), sweep


def plan_rungs(
    trials: int, steps: int, parts: Sequence[Fraction] = (), every: int = 1, earliest: int = 1
) -> tuple[Rung, ...]:
    """Half of the trials, rounded up, continue after each of ``parts`` of the steps, in steps of ``every``.

    By default one trial remains after 1/4: of eight half stop at 1/16, 1/8, 1/4 of the steps, which together are 1.75
    times the steps of one. None is before the ``earliest`` step, whose answers do not come from version 0, which all
    trials share, and the last one not before twice as many: a rate that is too high leads at first.
    """
    halvings = (trials - 1).bit_length()
    chosen = parts or [Fraction(1, 2 << n) for n in range(halvings, 0, -1)]
    found: dict[int, int] = {}  # of rungs on one step the last one counts
    for n, part in enumerate(chosen[:halvings], 1):
        first = 1 if parts else earliest + earliest * (n - 1) // max(1, halvings - 1)
        found[max(first, every * math.ceil(part * steps / every))] = -(-trials >> n)
    return tuple(Rung(step, keep) for step, keep in found.items() if step < steps)


def _fractions(text: str) -> list[Fraction]:
    try:
        parts = [Fraction(part) for part in text.split(",") if part]
    except (ValueError, ZeroDivisionError):
        parts = [Fraction(0)]
    if parts != sorted(set(parts)) or not all(0 < part < 1 for part in parts):
        raise ConfigError("--rungs", f"{text!r} does not rise between 0 and 1", "give parts of the steps: 1/4,1/2")
    return parts


def _names(combinations: Sequence[Sequence[str]]) -> list[str]:
    """``lr-3e-4-rank-16``: keys and values, or numbers where these are no names."""
    parts = ((override.partition("=") for override in own) for own in combinations)
    texts = ["-".join(f"{key.rpartition('.')[2]}-{value}" for key, _, value in own) for own in parts]
    names = [re.sub(r"[^a-z0-9_-]+", "_", text.lower()).strip("_") for text in texts]
    usable = all(map(state.NAME.fullmatch, names)) and len(set(names)) == len(names)
    return names if usable else [f"trial-{n}" for n in range(1, len(names) + 1)]


def launched(config: Config, sweep: Sweep) -> Config:
    """The checked configuration of `plan_sweep` as the run starts: its adapters join."""
    targets = sorted({target for adapter in config.adapters for target in adapter.target_modules})
    rollout = config.rollout.model_copy(update={"max_adapters": len(sweep.trials)})
    service = ServiceConfig(target_modules=targets)
    return config.model_copy(update={"adapters": [], "service": service, "rollout": rollout})


def measure(sweep: Sweep, records: Iterable[r.Record], end: float = math.inf) -> dict[str, float | None]:
    """The score of each remaining trial from the last decision to step ``end``; None: it failed, or nothing is known.

    ``records`` are valid (`iter_metrics`).
    """
    start = sweep.decisions[-1].step if sweep.decisions else 0
    rewards: dict[str, dict[int, float]] = {key: {} for key in sweep.remaining}
    evals: dict[str, dict[int, float]] = {}
    states: dict[str, AdapterPhase] = {}
    for record in records:
        match record:
            case r.StepRecord(adapter=key, step=step) if key in rewards and start <= step < end:
                rewards[key] |= {} if record.reward_mean is None else {step: record.reward_mean}
            case r.EvalRecord(adapter=key, version=version, order=0):
                value = record.reward_mean if record.accuracy is None else record.accuracy
                if value is not None:
                    evals.setdefault(key, {})[version] = value
            case r.AdapterStateRecord(adapter=key, state=phase):
                states[key] = phase
            case r.ResumeRecord(adapter=key):
                states.pop(key, None)  # a failed one is tried again
    # The version of the step may have retired before its evaluation: a newer one was measured.
    found: Mapping[str, float | None] = {
        key: of[min((version for version in of if version >= end), default=max(of))] for key, of in evals.items()
    }
    if sweep.by is Measure.REWARD:
        found = {k: statistics.fmean(v[step] for step in sorted(v)[len(v) // 2 :]) for k, v in rewards.items() if v}
    return {key: None if states.get(key) is AdapterPhase.FAILED else found.get(key) for key in rewards}


def ranked(scores: Mapping[str, float | None]) -> list[str]:
    """The best first; of equal ones the first of the plan. Without a score: last."""
    return sorted(scores, key=lambda key: -math.inf if (score := scores[key]) is None else score, reverse=True)


def decide(sweep: Sweep, rung: Rung, records: Iterable[r.Record]) -> RungDecision:
    """Which of the remaining trials stop at ``rung``, which all have reached; one continues in any case."""
    scores = measure(sweep, records, rung.step)
    order = ranked(scores)
    kept = [key for key in order[: rung.keep] if scores[key] is not None] or order[:1]
    return RungDecision(step=rung.step, scores=scores, stopped=tuple(key for key in order if key not in kept))


def desired(sweep: Sweep) -> state.DesiredAdapters:
    """The adapters of the run after the decisions so far. No others come, so it ends with the last one."""
    remaining = sweep.remaining
    phases = (state.DesiredPhase.ACTIVE if t.key in remaining else state.DesiredPhase.DELETED for t in sweep.trials)
    adapters = tuple(t.desired(phase) for t, phase in zip(sweep.trials, phases, strict=True))
    return state.DesiredAdapters(generation=1 + len(sweep.decisions), adapters=adapters, closed=True)


def read_sweep(folder: RunFolder) -> Sweep | None:
    """The sweep of the run; None where it has none. Raises ConfigError for a file that is none."""
    return state.read_record(folder.sweep, Sweep, "sweep", "restore it, or use --fresh")


def write_sweep(folder: RunFolder, sweep: Sweep) -> None:
    """Replace the record; it is on the disk when this returns."""
    write_file(folder.sweep, msgspec.json.format(msgspec.json.encode(sweep), indent=1) + b"\n", durable=True)


def record_sweep(folder: RunFolder, sweep: Sweep) -> None:
    """Record a new sweep; one that is there continues, under its names. Raises ConfigError for another one."""
    recorded = read_sweep(folder)
    if recorded is None:
        write_sweep(folder, sweep)
    elif _compared(recorded) != _compared(sweep):
        fix = "give its values and options, choose another run.name, or start over with --fresh"
        raise ConfigError("run.name", f"{folder} holds a sweep of other trials or rungs", fix)


def _compared(sweep: Sweep) -> Sweep:
    """Without what may differ in one sweep: the decisions, and how its command and values are written."""
    trials = tuple(msgspec.structs.replace(trial, name="", overrides=()) for trial in sweep.trials)
    return msgspec.structs.replace(sweep, command=(), trials=trials, decisions=())


def has_ended(folder: RunFolder) -> bool:
    """Whether a sweep is there whose trials have all made their steps or stopped; one that failed is tried again."""
    if (sweep := read_sweep(folder)) is None or not folder.summary.exists():
        return False
    parts, ends = read_summary(folder).adapters, (AdapterPhase.DONE, AdapterPhase.DELETED)
    return all(trial.key in parts and parts[trial.key].state in ends for trial in sweep.trials)


class Halving:
    """Makes the decisions of a run's sweep from its records; does nothing in a run without one."""

    def __init__(self, folder: RunFolder, console: LiveConsole) -> None:
        self._folder, self._console, self._sweep = folder, console, read_sweep(folder)
        if self._sweep is not None:
            self._follow(self._sweep)

    def look(self) -> None:
        """Call it often: it reads the records once a rung."""
        sweep = self._sweep
        if sweep is None or len(sweep.decisions) == len(sweep.rungs):
            return
        rung = sweep.rungs[len(sweep.decisions)]
        if not all(self._reached(key, rung.step, sweep.by) for key in sweep.remaining):
            return
        decision = decide(sweep, rung, iter_metrics(self._folder))
        self._sweep = sweep.with_decision(decision)
        write_sweep(self._folder, self._sweep)
        self._follow(self._sweep)
        scores = ", ".join(f"{key} {number(decision.scores[key])}" for key in ranked(decision.scores))
        self._console.note(f"rung at step {rung.step}: {scores}; stops: {', '.join(decision.stopped) or 'none'}")

    def _reached(self, key: str, step: int, by: Measure) -> bool:
        trial = self._console.view.adapter(key)
        evaluated = by is Measure.REWARD or (trial.last_eval is not None and trial.last_eval.version >= step)
        return trial.state is AdapterPhase.FAILED or (trial.steps_done >= step and evaluated)

    def _follow(self, sweep: Sweep) -> None:
        if (wanted := desired(sweep)).generation > state.read_desired(self._folder).generation:
            state.write_desired(self._folder, wanted)


def print_plan(sweep: Sweep, console: Console) -> None:
    rungs = ", ".join(f"step {rung.step} keeps {rung.keep}" for rung in sweep.rungs) or "none"
    print_line(console, f"{len(sweep.trials)} trials, compared by {sweep.by}; rungs: {rungs}")
    for trial in sweep.trials:
        print_line(console, f"  {trial.name}: {' '.join(trial.overrides)}")


def print_result(folder: RunFolder, console: Console) -> None:
    """A table of the trials, the winner with its overrides, and what a run of its own gives; nothing without a sweep.

    The winner has the best newest score: a trial that declines loses to one that stopped. The run must have a summary.
    """
    if (sweep := read_sweep(folder)) is None:
        return
    final, summary = measure(sweep, iter_metrics(folder)), read_summary(folder)
    columns = [*(decision.scores for decision in sweep.decisions), final]
    table = Table(box=None, pad_edge=False)
    at = [f"by step {decision.step}" for decision in sweep.decisions]
    for head in ("trial", "steps", "state", *at, "at the end", "accuracy"):
        table.add_column(head, overflow="fold")
    order = dict.fromkeys(key for scores in reversed(columns) for key in ranked(scores))
    for key in order:
        part = summary.adapters[key]
        phase = "stopped" if part.state is AdapterPhase.DELETED else str(part.state)
        scores = (number(scores.get(key)) for scores in columns)
        table.add_row(key.removesuffix(".1"), str(part.steps), phase, *scores, number(part.eval_last))
    console.print(table)
    trials = {trial.key: trial for trial in sweep.trials}
    newest = {key: [scores[key] for scores in columns if scores.get(key) is not None] for key in order}
    failed = {key for key in order if summary.adapters[key].state is AdapterPhase.FAILED}
    last = {key: scores[-1] for key, scores in newest.items() if scores and key not in failed}
    winner = next(iter(ranked(last)), None)
    if winner is None:
        print_line(console, "winner   none: every trial has failed or has no score")
        return
    early = "" if winner in final else ", stopped: those that continued ended lower"
    others = "in a run of its own it has other rounding, which depends on neighbours (without rollout.deterministic)"
    curve = "a run of its own has the same curve, bit for bit (rollout.deterministic)" if sweep.repeats else others
    print_line(console, f"winner   {trials[winner].name}: {sweep.by} {number(last[winner])}{early}; {curve}")
    print_line(console, f"set      {' '.join(trials[winner].overrides)}")
    apart = f"run.name={folder.path.name}-{trials[winner].name}"  # not in the sweep's folder
    words = (*(word for word in sweep.command if not word.startswith("run.name=")), apart, *trials[winner].overrides)
    print_line(console, f"alone    areal-lora {shlex.join(words)}")
