"""Several runs on one page: their figures, where their configurations differ, and their curves in the same charts."""

import json
from collections.abc import Collection, Sequence
from html import escape
from typing import Any

import msgspec

from areal_lora.config.recorded import differences
from areal_lora.obs.report.charts import Chart, Line
from areal_lora.obs.report.inspector import RolloutOverview
from areal_lora.obs.report.page import ChartSection, PageData, RunPage, charts, headlines, table

IGNORED = ("run.name", "run.root")
SHOWN = 120


def differing_keys(configurations: Sequence[Any]) -> dict[str, list[Any]]:
    """The values of all configurations for each dotted key in which one differs from the first."""
    first, *others = configurations
    found: dict[str, list[Any]] = {}
    for place, other in enumerate(others, 1):
        for key, ours, theirs in differences(first, other):
            if key not in IGNORED:
                found.setdefault(key, [ours] * len(configurations))[place] = theirs
    return found


def shown(value: Any) -> str:
    """A figure or the value of a key as text, at most ``SHOWN`` characters."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = value if isinstance(value, str) else "-" if value is None else json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def pages_of(runs: Sequence[RunPage], opened: Collection[str] | None = None) -> PageData:
    """The page of one run, or of several side by side, see `RunPage.data`. Runs of one name get numbers."""
    if len(runs) == 1:
        return runs[0].data(opened=opened)
    names = [run.config.run.name for run in runs]
    names = [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names, 1)]
    named = dict(zip(names, runs, strict=True))
    together = ChartSection(
        id="runs",
        charts=_joined([(name, section) for name, run in named.items() for section in run.sections()]),
        clocks={
            f"{name} {adapter}" if run.several else name: clock
            for name, run in named.items()
            for adapter, clock in run.clocks().items()
        },
    )
    figures = [{"run": name} | dict(headlines(run.figures.total)) for name, run in named.items()]
    body = f"<h1>{len(runs)} runs side by side</h1>{table('Figures', figures)}"
    keys = differing_keys([run.config.model_dump(mode="json") for run in runs])
    rows = [{"key": key} | dict(zip(names, map(shown, values), strict=True)) for key, values in keys.items()]
    body += table("Where the configurations differ", rows) + f"<h2>Curves</h2>{charts(together)}"
    sections, rollouts = [together], list[RolloutOverview]()
    for i, (name, run) in enumerate(named.items()):
        page = run.data(f"run{i}-", opened)
        body += f"<details><summary>{escape(name)}</summary>{page.body}</details>"
        sections += page.sections
        rollouts += [msgspec.structs.replace(of_run, run=name) for of_run in page.rollouts]
    return PageData(title=", ".join(names), body=body, sections=sections, rollouts=rollouts)


def _joined(sections: Sequence[tuple[str, ChartSection]]) -> list[Chart]:
    """Charts by title, with the lines of all sections; a line's name starts with its run and adapter."""
    found: dict[tuple[str, str], list[Chart]] = {}
    for name, section in sections:
        adapter, *others = section.clocks
        for chart in [] if others else section.charts:  # the charts of each of several follow
            prefix = name if section.id.endswith("run") else f"{name} {adapter}"
            lines = [Line(f"{prefix} {line.name}".rstrip(), line.x, line.y) for line in chart.lines]
            found.setdefault((chart.title, chart.x), []).append(msgspec.structs.replace(chart, lines=lines, marks=[]))
    return [
        msgspec.structs.replace(
            same[0], lines=[line for chart in same for line in chart.lines], unit=all(chart.unit for chart in same)
        )
        for same in found.values()
    ]
