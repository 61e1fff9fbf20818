"""The page of a run: figures, charts and rollouts in one file without external resources; ``report.html`` is one.

What a model, a user or a process wrote is escaped here.
"""

import os
import re
import statistics
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path

import msgspec

from areal_lora.config.models import Config
from areal_lora.config.recorded import AdapterRun, adapter_runs, config_digest, read_config, with_joined
from areal_lora.obs.console import duration, eval_text, label, number, percent
from areal_lora.obs.metrics.reader import iter_metrics
from areal_lora.obs.metrics.records import Record, StepRecord
from areal_lora.obs.report.charts import Chart, ClockData, RunCharts
from areal_lora.obs.report.inspector import RolloutIndex, RolloutOverview
from areal_lora.obs.report.summary import Figures, RunFigures
from areal_lora.obs.report.version_answers import answers_section
from areal_lora.obs.run_view import RunView, counted, newest_state
from areal_lora.run_folder import events
from areal_lora.run_folder.paths import RunFolder, write_file
from areal_lora.run_folder.status import read_statuses

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("uPlot.iife.min.js", "page.js", "rollouts.js")
STYLES = ("uPlot.min.css", "page.css")


class ChartSection(msgspec.Struct, frozen=True, kw_only=True):
    """Charts below the element ``id`` of the page; ``clocks`` by what the names of its lines start with."""

    id: str
    charts: list[Chart]
    clocks: dict[str, ClockData]


class PageData(msgspec.Struct, frozen=True, kw_only=True):
    """What the page shows: ``body`` is HTML, in which all texts of users and models are escaped."""

    title: str
    body: str
    sections: list[ChartSection]
    rollouts: list[RolloutOverview]


def write_report(run_folder: RunFolder | Path | str) -> Path:
    """Write ``report.html`` from the current run folder; the run need not be finished."""
    folder = RunFolder.of(run_folder)
    write_file(folder.report, report_page(RunPage(folder)))
    return folder.report


def report_page(run: "RunPage") -> str:
    """The text of the page of ``run``, which has no records yet."""
    for record in iter_metrics(run.folder):
        run.add(record)
    return page_text(msgspec.structs.replace(run.data(), rollouts=[run.rollouts.ends()]))


def page_text(data: PageData, *, live: bool = False) -> str:
    """One file without requests to elsewhere; ``live``: the page fetches newer data from the server that sent it."""
    scripts = [(ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS]
    style = "".join((ASSETS / name).read_text(encoding="utf-8") for name in STYLES)
    # `<` cannot end the script element, whatever a text contains. The body is there already.
    shown = msgspec.json.encode(msgspec.structs.replace(data, body="")).decode().replace("<", "\\u003c")
    hashes = " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(data.title)}</title><style>{style}</style></head><body data-live="{"1" if live else ""}">
<main><div id="main">{data.body}</div><section id="rollouts" aria-labelledby="rollouts-title">
<h2 id="rollouts-title">Rollouts</h2></section></main>
<script type="application/json" id="data">{shown}</script>
{"".join(f"<script>{text}</script>" for text in scripts)}
</body></html>
"""


class RunPage:
    """One run: ``add`` valid records (`iter_metrics`), then take ``data``. ``shown``: the text of its configuration.

    Adapters that left are among those of the run if they are ``known``.
    """

    def __init__(
        self,
        folder: RunFolder,
        shown: Callable[[Config], str] = lambda config: config.model_dump_json(indent=2),
        known: Mapping[str, AdapterRun] | None = None,
    ) -> None:
        self.folder = folder
        self.config = with_joined(read_config(folder), folder)
        self._digest, self._shown = config_digest(folder), shown
        self.runs = {**(known or {}), **adapter_runs(self.config)}
        self.figures, self.charts = RunFigures(list(self.runs)), RunCharts(list(self.runs))
        self.view = RunView({name: run.end for name, run in self.runs.items()})
        self.rollouts = RolloutIndex(folder)

    def add(self, record: Record) -> None:
        self.figures.add(record)
        self.charts.add(record)
        self.view.add(record)

    @property
    def several(self) -> bool:
        return len(self.runs) != 1 or any(run.endless for run in self.runs.values())

    def clocks(self) -> dict[str, ClockData]:
        return {name: charts.clock() for name, charts in self.charts.adapters.items()}

    def sections(self, prefix: str = "", opened: Collection[str] | None = None) -> list[ChartSection]:
        """The charts of the run, and of several adapters those with their ids in ``opened``, by default all.

        ``prefix`` distinguishes runs of one page.
        """
        clocks = self.clocks()
        if not self.several:
            charts = next(iter(self.charts.adapters.values())).data()
            return [ChartSection(id=f"{prefix}run", charts=charts, clocks=clocks)]
        compared = [name for name, run in self.runs.items() if not run.endless]
        ids = {name: f"{prefix}plots-{name}" for name in self.runs}
        return [
            ChartSection(id=f"{prefix}run", charts=self.charts.together(compared), clocks=clocks),
            *(
                ChartSection(id=ids[name], charts=found.data(), clocks={name: clocks[name]})
                for name, found in self.charts.adapters.items()
                if opened is None or ids[name] in opened
            ),
        ]

    def data(self, prefix: str = "", opened: Collection[str] | None = None) -> PageData:
        """See `sections`; places of charts that are not ``opened`` are empty."""
        sections = self.sections(prefix, opened)
        title, rollouts = self.config.run.name, [self.rollouts.overview()]
        return PageData(title=title, body=self._body(prefix, sections), sections=sections, rollouts=rollouts)

    def _body(self, prefix: str, sections: Sequence[ChartSection]) -> str:
        folder, config, total = self.folder, self.config, self.figures.total
        subtitle = f"{config.model.path} · seed {config.run.seed} · configuration {self._digest[:12]}"
        if self.several:
            run = overview(folder, self.runs, self.figures) + charts(sections[0])
            drawn = {section.id: section for section in sections}
            adapters = "<h2>Each adapter</h2>" + "".join(
                _section(name, run, self.figures.adapters[name], prefix, drawn.get(f"{prefix}plots-{name}"))
                for name, run in self.runs.items()
            )
        else:
            run = f"{boxes(headlines(total))}\n<h2>The run</h2>{charts(sections[0])}"
            adapters = ""
        end = events.last_end(folder)
        problems = "".join(f'<p class="problem" role="status">{escape(text)}</p>' for text in self.view.problems)
        failure = f'\n<p class="sub"><b>Ended with exit code {end.code}: {escape(str(end))}</b></p>' if end else ""
        return f"""<h1>{escape(config.run.name)}</h1><p class="sub">{escape(subtitle)}</p>{failure}
{problems}{"" if end or folder.summary.exists() else self._now()}{run}
{_evals(total, self.several)}{_counts(total)}{_traceback(folder)}{_resumes(total)}{_restarts(folder)}
{adapters}{answers_section(folder)}
<h2>Configuration</h2><details><summary>As resolved</summary><pre>{escape(self._shown(config))}</pre></details>"""

    def _now(self) -> str:
        """What each process does, which version is served and how it was checked."""
        view, newest = self.view, {record.adapter: record.version for record in self.view.publishes}
        served = ", ".join(f"{view.prefix(name)}v{version}" for name, version in newest.items())
        rows = [{"process": name, "does": text} for name, text in read_statuses(self.folder).items()]
        for row in rows:
            if (name := row["process"]).startswith("server-"):
                row["serves"] = f"excluded: {view.excluded[name]}" if name in view.excluded else served or "-"
        left, published = view.remaining_s(), view.publishes[-1] if view.publishes else None
        pairs = [("steps", counted(view.steps_done, view.total))]
        pairs += [("remaining", duration(left))] if left is not None else []
        if published is not None:
            # A server whose fingerprints differ from the trainer's does not commit.
            servers = f"{published.servers} server{'s' * (published.servers != 1)}"
            pairs.append((f"served by {servers}, fingerprints equal", f"v{published.version}"))
            error = published.probe_mean_abs
            pairs += [("probe of what serves, mean |Δ logp|", number(error, 2))] if error is not None else []
        queue = view.steps[-1].metrics if view.steps else {}
        pairs += [
            (f"groups {name}", f"{count:.0f}")
            for name in ("running", "ready", "leased")
            if (count := queue.get(f"train/groups_{name}")) is not None
        ]
        return f"<h2>Now</h2>{boxes(pairs)}{table('', rows)}"


def _evals(metrics: Figures, several: bool) -> str:
    lasts = sorted((records[-1] for records in metrics.sets.values()), key=lambda last: (last.adapter, last.order))
    rows = [
        ({"adapter": last.adapter} if several else {})
        | {
            "set": last.name,
            "version": f"v{last.version}",
            "problems x answers": f"{last.n} x {last.n_samples}",
            "temperature": f"{last.temperature:g}",
            **{name.replace("_", " "): number(v) for name, v in last.scalars().items() if v is not None},
            "accuracy, 95 %": _range(last.accuracy_95) + (f" ({last.interval})" if last.interval else ""),
            "reward, 95 %": _range(last.reward_95),
            "left out": str(last.left_out),
        }
        for last in lasts
    ]
    return table("Evaluations, the last of each set", rows)


def _range(ends: tuple[float, float] | None) -> str:
    return "-" if ends is None else f"{number(ends[0])} to {number(ends[1])}"


def _counts(metrics: Figures) -> str:
    """Outcomes of the groups of each adapter, from the adapter's last step; a client's has none."""
    rows = []
    for name, step in metrics.last_by_adapter.items():
        groups = {
            "issued": _metric(step, "groups_issued"),
            "consumed": _metric(step, "groups_consumed"),
            "dropped": _listed(step.dropped),
            "retried": _listed(step.retried),
            "re-issued": _metric(step, "reissued"),
            "late duplicates": _metric(step, "late"),
            "last faults": step.faults_text or "-",
        }
        size = metrics.checkpoint_bytes.get(name)
        written = {"checkpoint": "-" if size is None else f"{size / 2**20:.1f} MiB"}
        written["checkpoints failed"] = str(metrics.checkpoints_failed[name])
        rows.append({"adapter": name or "-"} | (dict.fromkeys(groups, "-") if step.by_client else groups) | written)
    return table("Groups and checkpoints", rows)


def _metric(step: StepRecord, name: str) -> str:
    return f"{step.metrics.get(f'train/{name}') or 0:.0f}"


def _traceback(folder: RunFolder) -> str:
    """The newest one in the controller's log, which has those of rewards, agents and environments."""
    try:
        with folder.log("controller-0").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TRACED_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""  # it has not started
    texts = [_LOGGED.sub("", line) for line in lines]
    if TRACEBACK not in texts:
        return ""
    first = len(texts) - 1 - texts[::-1].index(TRACEBACK)
    last = next((i for i in range(first + 1, len(texts)) if not texts[i].startswith(" ")), len(texts) - 1)
    shown = escape("\n".join(texts[first : last + 1]))
    title = "<h2>Newest traceback of the controller</h2>"
    return f"{title}<details><summary>{escape(texts[last])}</summary><pre>{shown}</pre></details>"


TRACED_BYTES = 1 << 18
TRACEBACK = "Traceback (most recent call last):"
_LOGGED = re.compile(r"^\d\d:\d\d:\d\d\.\d+ \S+ [A-Z]+ \S+: (    )?")
"""What a log puts before a line; a traceback is indented."""


def _resumes(metrics: Figures) -> str:
    rows = [
        {"adapter": r.adapter or "-", "version": f"v{r.version}", "after": duration(r.time_s)} for r in metrics.resumes
    ]
    return table("Resumed from a checkpoint", rows)


def _restarts(folder: RunFolder) -> str:
    rows = []
    for event in events.read_events(folder):
        match event:
            case events.RestartEvent(process=process, how=why):
                pass
            case events.StallEvent(process=process, stacks=stacks):
                why = f"sent no heartbeat; stacks in {stacks}"
            case events.AbandonEvent(process=process, how=how):
                why = f"{how}; the run continues without it"
            case events.RequeueEvent(job=job, why=reason):
                process, why = f"Slurm job {job}", f"requeued: {reason}"
            case events.EndEvent(process=process, code=code):
                why = f"{event}; the run ended with exit code {code}"
            case _:
                continue
        rows.append({"at": event.at, "process": process, "because it": why})
    return table("Restarts and failures", rows)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "0"


def overview(folder: RunFolder, runs: Mapping[str, AdapterRun], found: RunFigures) -> str:
    """The run's figures, and a row per adapter."""
    states = Counter(str(_state(run, found.adapters[name])) for name, run in runs.items())
    counted = ", ".join(f"{n} {state}" for state, n in states.items())
    rows = [_row(folder, name, run, found) for name, run in runs.items()]
    total = [(f"adapters: {counted}", str(len(runs)))]
    total += [pair for pair in headlines(found.total) if not pair[0].startswith("held-out")]
    return f"{boxes(total)}{table('Adapters', rows)}<h2>The run</h2>"


def _section(name: str, run: AdapterRun, its: Figures, prefix: str, section: ChartSection | None) -> str:
    """An adapter: its state with the reason; its figures and charts when it is chosen."""
    why = f": {its.recorded.reason}" if its.recorded and its.recorded.reason else ""
    about = f"{_state(run, its)} after {_made(run, its)} steps{why} · seed {run.seed} · weight {run.weight:g} · "
    about += "driven by a client" if run.endless else f"staleness up to {run.max_staleness}"
    return (
        f'<section id="{escape(f"{prefix}adapter-{name}")}"><details data-plots="{escape(f"{prefix}plots-{name}")}">'
        f"<summary><strong>{escape(name)}</strong> <span>{escape(about)}</span></summary>"
        f"{boxes(headlines(its))}{charts(section) if section else ''}</details></section>"
    )


def _made(run: AdapterRun, its: Figures) -> str:
    return f"{its.steps}" if run.endless else f"{its.steps} of {run.steps}"


def _row(folder: RunFolder, name: str, run: AdapterRun, found: RunFigures) -> dict[str, str]:
    its, export = found.adapters[name], folder.adapter_export(name)
    return {
        "adapter": name,
        "state": str(_state(run, its)),
        "steps": _made(run, its),
        "weight": f"{run.weight:g}",
        "trained tokens": percent(found.share(name)),
        "accuracy": course(e.accuracy for e in its.evals),
        "best": eval_text(its.best_eval),
        "mean reward": course(e.reward_mean for e in its.evals),
        "staleness: mean, largest": staleness(its),
        "folder": str(export.relative_to(folder.path)) if export.is_dir() else "-",
        "why": (its.recorded.reason if its.recorded else "") or "-",
    }


def _state(run: AdapterRun, its: Figures) -> str:
    return newest_state(its.recorded, its.steps, run.end)


def boxes(pairs: Iterable[tuple[str, str]]) -> str:
    """Boxes with a label and a value each."""
    found = [f'<div class="figure"><b>{escape(v)}</b><span>{escape(label)}</span></div>' for label, v in pairs]
    return f'<div class="figures">{"".join(found)}</div>'


def charts(section: ChartSection) -> str:
    """The place of a section's charts, with their titles; the script draws them."""
    if not section.charts:
        return '<p class="sub">Nothing recorded.</p>'
    figures = [
        f"<figure><figcaption>{escape(chart.title)} <small>{escape(chart.note)}</small></figcaption></figure>"
        for chart in section.charts
    ]
    return f'<div class="plots" id="{escape(section.id)}">{"".join(figures)}</div>'


def headlines(metrics: Figures) -> list[tuple[str, str]]:
    """The figures of a run or of one adapter, evaluations first, without those that were not measured."""
    last, totals, speeds, evals = metrics.last_step, metrics.publish_ms, metrics.speeds, metrics.evals
    pairs = [
        ("held-out greedy accuracy", course(e.accuracy for e in evals)),
        ("held-out mean reward", course(e.reward_mean for e in evals)),
        ("held-out answers unscored", f"{evals[-1].unscored} of {evals[-1].n}" if evals else "-"),
        ("held-out prompts left out", str(evals[-1].left_out) if evals else "-"),
        ("optimizer steps", str(metrics.steps)),
        ("trained tokens", label(metrics.trained_tokens)),
        ("loss of the last step", number(last.metrics.get("train/loss") if last else None)),
        ("wall time", duration(last.time_s) if last else "-"),
        ("publish, median", f"{statistics.median(totals):.1f} ms" if totals else "-"),
        ("largest mean probe error, nats", number(metrics.probe_mean_abs, 2)),
        ("staleness, versions: mean, largest", staleness(metrics)),
        ("rollout, median", f"{label(round(statistics.median(speeds)))} tok/s" if speeds else "-"),
    ]
    return [(label, value) for label, value in pairs if value != "-"]


def staleness(metrics: Figures) -> str:
    return "-" if metrics.max_staleness is None else f"{number(metrics.mean_lag, 2)}, {metrics.max_staleness}"


def course(values: Iterable[float | None]) -> str:
    return " → ".join(number(v) for v in values if v is not None) or "-"


def table(title: str, rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of cells by the heads of their columns; nothing without rows."""
    if not rows:
        return ""
    heads = dict.fromkeys(head for row in rows for head in row)
    lines = ["".join(f"<td>{escape(row.get(head, '-'))}</td>" for head in heads) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    head = f"<h2>{title}</h2>" if title else ""
    names = "".join(f"<th>{name}</th>" for name in heads)
    return f"{head}<div class='table' tabindex='0'><table><tr>{names}</tr>{body}</table></div>"
