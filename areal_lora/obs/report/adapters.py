"""The parts of the report of a run with several adapters: the overview, and a section of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from areal_lora.config.recorded import AdapterRun
from areal_lora.obs.console import number, percent
from areal_lora.obs.metrics.records import EvalRecord, Record
from areal_lora.obs.report.figures import Figures, RunFigures
from areal_lora.obs.report.parts import (
    charts,
    client_headlines,
    course,
    figures,
    figures_of,
    headlines,
    samples,
    staleness,
    table,
)
from areal_lora.obs.report.plots import Plots, rewards_together
from areal_lora.obs.report.summary import Shares
from areal_lora.obs.run_view import newest_state
from areal_lora.run_folder.paths import RunFolder


class RunPlots:
    """The plots of each adapter, and those of several together. ``add`` valid records (`iter_metrics`)."""

    def __init__(self, adapters: Sequence[str]) -> None:
        self.adapters = {name: Plots() for name in adapters}
        self.shares = Shares(adapters)

    def add(self, record: Record) -> None:
        self.shares.add(record)
        only = next(iter(self.adapters)) if len(self.adapters) == 1 else None
        if (plots := self.adapters.get(only or record.adapter)) is not None:
            plots.add(record)


def overview(folder: RunFolder, runs: Mapping[str, AdapterRun], found: RunFigures, plots: RunPlots) -> str:
    """The run's figures, a row per adapter, and what shows them together."""
    states = Counter(str(_state(run, found.adapters[name])) for name, run in runs.items())
    counted = ", ".join(f"{n} {state}" for state, n in states.items())
    head = ["adapter", "state", "steps", "weight", "trained tokens", "accuracy", "best", "mean reward"]
    head += ["staleness: mean, largest", "folder", "why"]
    rows = [_row(folder, name, run, found) for name, run in runs.items()]
    rewarded = {name: plots.adapters[name] for name, run in runs.items() if not run.endless}
    together = [
        ("Shares of trained tokens", "of each span of time", plots.shares.draw()),
        ("Reward", "smoothed, over each adapter's own steps", rewards_together(rewarded)),
    ]
    boxes = figures([(f"adapters: {counted}", str(len(runs))), *headlines(found.total)])
    return f"{boxes}{table('Adapters', head, rows)}<h2>The run</h2>{charts(together)}"


def sections(runs: Mapping[str, AdapterRun], found: RunFigures, plots: RunPlots) -> str:
    """A section per adapter: its state with the reason, its figures, plots and samples."""
    return "".join(_section(name, run, found.adapters[name], plots.adapters[name]) for name, run in runs.items())


def _section(name: str, run: AdapterRun, its: Figures, plots: Plots) -> str:
    head = f'<section id="adapter-{escape(name)}"><h2>{escape(name)}</h2>'
    head += f'<p class="sub">{escape(" · ".join(_about(run, its)))}</p>'
    if run.endless:
        return f"{head}{figures(client_headlines(its))}<h3>Plots</h3>{charts(plots.of_client())}</section>"
    shown = f"{len(its.early) + len(its.late)} sample rollouts"
    return (
        f"{head}{figures_of(its)}<h3>Plots</h3>{charts(plots.all())}"
        f"<details><summary>{shown}</summary>{samples(its.early, list(its.late))}</details></section>"
    )


def _about(run: AdapterRun, its: Figures) -> Iterator[str]:
    why = its.recorded.reason if its.recorded else ""
    yield f"{_state(run, its)} after {_made(run, its)} steps" + (f": {why}" if why else "")
    yield f"seed {run.seed}"
    yield f"weight {run.weight:g}"
    yield "driven by a client" if run.endless else f"staleness up to {run.max_staleness}"


def _made(run: AdapterRun, its: Figures) -> str:
    return f"{its.steps}" if run.endless else f"{its.steps} of {run.steps}"


def _row(folder: RunFolder, name: str, run: AdapterRun, found: RunFigures) -> tuple[str, ...]:
    its, export = found.adapters[name], folder.adapter_export(name)
    return (
        name,
        str(_state(run, its)),
        _made(run, its),
        f"{run.weight:g}",
        percent(found.share(name)),
        course(e.accuracy for e in its.evals),
        _best(its.best_eval),
        course(e.reward_mean for e in its.evals),
        staleness(its),
        str(export.relative_to(folder.path)) if export.is_dir() else "-",
        (its.recorded.reason if its.recorded else "") or "-",
    )


def _best(best: EvalRecord | None) -> str:
    if best is None:
        return "-"
    return f"{number(best.reward_mean if best.accuracy is None else best.accuracy)} (v{best.version})"


def _state(run: AdapterRun, its: Figures) -> str:
    return newest_state(its.recorded, its.steps, run.end)
