"""Show the progress of a run in the launcher.

On a terminal, a panel is redrawn at each ``tick``; elsewhere each event is one plain line.
All data comes from the run folder, without a connection to any process.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_lora.obs.metrics.reader import MetricsTail
from areal_lora.obs.metrics.records import (
    CheckpointRecord,
    EvalRecord,
    PublishRecord,
    Record,
    ResumeRecord,
    RolloutSampleRecord,
    StepRecord,
    mean_lag,
)
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import read_statuses

QUIET_S = 15.0
"""Time without a record after which process statuses are shown again."""
PROBLEMS_SHOWN = 3
WINDOW = 20
"""Steps and publishes that medians and the remaining time are computed over."""
KEPT = 512
"""The number of newest steps and publishes in memory; staleness is shown over these steps."""
BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 32) -> str:
    """The last ``width`` values as one character each, scaled to their minimum and maximum."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] for v in shown)


def duration(seconds: float) -> str:
    """``75`` -> ``1:15``; ``3725`` -> ``1:02:05``."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, whole = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes}:{whole:02d}"


def number(value: float | None, digits: int = 3) -> str:
    """Format a number; None (not measured) is a dash."""
    return "-" if value is None else f"{value:.{digits}g}" if abs(value) < 1e-3 and value else f"{value:.{digits}f}"


def publish_problem(record: PublishRecord) -> str | None:
    """Describe the problem of a publish in one line; None if there is none."""
    if record.version > 0 and not record.differs_from_base:
        return f"publish v{record.version}: the servers still score like the base model"
    if record.probe_mean_abs is None:
        return f"publish v{record.version}: the parity probe returned no finite value"
    return None


class RunView:
    """Accumulates the records shown; drawing is separate, so that the state is testable."""

    def __init__(self) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=KEPT)
        self.publishes: deque[PublishRecord] = deque(maxlen=KEPT)
        self._resumed_at = 0
        self.last_eval: EvalRecord | None = None
        self.first_eval: EvalRecord | None = None
        self.problems: deque[str] = deque(maxlen=PROBLEMS_SHOWN)

    def add(self, record: Record) -> None:
        match record:
            case StepRecord():
                self.steps.append(record)
            case PublishRecord():
                self.publishes.append(record)
                problem = publish_problem(record)
                if problem:
                    self.problems.append(problem)
            case EvalRecord():
                self.first_eval, self.last_eval = self.first_eval or record, record
            case RolloutSampleRecord() | CheckpointRecord():
                pass
            case ResumeRecord(adapter=name, version=version):
                self._resumed_at = version
                steps = (s for s in self.steps if s.adapter != name or s.step < version)
                publishes = (p for p in self.publishes if p.adapter != name or p.version <= version)
                self.steps, self.publishes = deque(steps, maxlen=KEPT), deque(publishes, maxlen=KEPT)

    @property
    def staleness(self) -> dict[int, int]:
        """Trained tokens of the newest steps by versions of lag."""
        counts: Counter[int] = Counter()
        for record in self.steps:
            counts.update(record.staleness)
        return dict(counts)

    @property
    def steps_done(self) -> int:
        return self.steps[-1].step + 1 if self.steps else self._resumed_at

    def remaining_s(self, total_steps: int) -> float | None:
        """Remaining seconds at the recorded pace of the last steps; None before step 2."""
        recent = list(self.steps)[-WINDOW - 1 :]
        if len(recent) < 2:
            return None
        pace = (recent[-1].time_s - recent[0].time_s) / (len(recent) - 1)
        return max(0, total_steps - self.steps_done) * max(0.0, pace)

    def sync_p50(self) -> tuple[float, dict[str, float]] | None:
        """Median total and median of each sequential phase over the last publishes, in ms."""
        recent = list(self.publishes)[-WINDOW:]
        totals = [p.total_ms for p in recent if p.total_ms is not None]
        if not totals:
            return None
        rows = [p.sequence_ms() for p in recent]
        return statistics.median(totals), {name: statistics.median(row[name] for row in rows) for name in rows[0]}


class LiveConsole:
    """Call ``start``, then ``tick`` a few times a second, then ``stop``. A tick reads only new records."""

    def __init__(
        self,
        run_folder: RunFolder,
        total_steps: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = run_folder
        self._total = total_steps
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._tail = MetricsTail(run_folder)
        self._live: Live | None = None
        self._statuses: dict[str, str] = {}
        self._started = self._changed = clock()
        self.view = RunView()

    def start(self) -> None:
        """Start. Existing records of a resumed run are read but not printed."""
        self._started = self._changed = self._clock()
        while records := self._tail.read_new():
            for record in records:
                self.view.add(record)
        self._statuses = read_statuses(self._folder)
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def tick(self) -> None:
        """Read and show new records and statuses."""
        records, statuses = self._tail.read_new(), read_statuses(self._folder)
        if records:
            self._changed = self._clock()
        for record in records:
            self.view.add(record)
        if self._live is not None:
            self._statuses = statuses
            self._live.update(self.render(), refresh=True)
        else:
            self._print_plain(records, statuses)

    def say(self, text: str) -> None:
        """Print one line about an event that no record holds."""
        self._line(text)

    def stop(self) -> None:
        """Show the last records and restore the terminal. Idempotent."""
        self.tick()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print_plain(self, records: list[Record], statuses: dict[str, str]) -> None:
        if not self.view.steps or self._clock() - self._changed > QUIET_S:
            for who, text in statuses.items():
                if self._statuses.get(who) != text:
                    self._line(f"{who}: {text}")
        self._statuses = statuses
        for record in records:
            line = self._plain_line(record)
            if line:
                self._line(line)

    def _line(self, text: str) -> None:
        # Wrapping would split one event over several lines of a log file.
        self._console.print(f"[{duration(self._clock() - self._started)}] {text}", markup=False, soft_wrap=True)

    def _plain_line(self, record: Record) -> str | None:
        match record:
            case StepRecord():
                sync = self.view.sync_p50()
                left = self.view.remaining_s(self._total)
                parts = [f"step {record.step + 1}/{self._total}", f"reward {number(record.reward_mean)}"]
                parts += [f"loss {number(record.loss)}", f"grad {number(record.grad_norm)}"]
                parts += [f"staleness {_histogram(record.staleness)}", f"sync {number(sync[0], 1) if sync else '-'} ms"]
                parts += [f"{number(record.rollout_tokens_per_s, 0)} tok/s", f"{record.step_s:.2f} s"]
                return "  ".join([*parts, f"ETA {duration(left)}" if left is not None else "ETA -"])
            case EvalRecord():
                return f"eval of v{record.version}: {record.figures()}"
            case PublishRecord():
                return publish_problem(record)
            case CheckpointRecord(failed=True, version=version):
                return f"checkpoint v{version} was not written, see the trainer's log"
            case RolloutSampleRecord() | CheckpointRecord():
                return None
            case ResumeRecord():
                return f"resumed from checkpoint v{record.version}"

    def render(self) -> RenderableType:
        """The panel for a terminal."""
        view, rows = self.view, Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column()
        rows.add_row("steps", self._progress())
        if view.steps:
            self._add_step_rows(rows)
        if view.last_eval and view.first_eval:
            first, last = view.first_eval, view.last_eval
            text = f"v{last.version}: {last.figures()}"
            before = first.reward_mean if last.accuracy is None else first.accuracy
            rows.add_row("eval", text if first is last else f"{text}   (v{first.version}: {number(before)})")
        sync = view.sync_p50()
        if sync:
            phases = "  ".join(f"{name} {number(ms, 1)}" for name, ms in sync[1].items())
            rows.add_row("sync", f"{number(sync[0], 1)} ms p50   {phases}")
        parts: list[RenderableType] = [rows]
        parts += [Text(problem, style="bold red") for problem in view.problems]
        if not view.steps or self._clock() - self._changed > QUIET_S:
            parts += [Text(""), self._status_table()]
        return Panel(Group(*parts), title=self._folder.name, title_align="left", border_style="dim")

    def _progress(self) -> RenderableType:
        left = self.view.remaining_s(self._total)
        eta = "-" if left is None else duration(left)
        grid = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._total, completed=min(self.view.steps_done, self._total), width=32)
        elapsed = duration(self._clock() - self._started)
        grid.add_row(bar, f"{self.view.steps_done}/{self._total}", f"elapsed {elapsed}", f"ETA {eta}")
        return grid

    def _add_step_rows(self, rows: Table) -> None:
        last = self.view.steps[-1]
        rewards = [s.reward_mean for s in self.view.steps if s.reward_mean is not None]
        rows.add_row("reward", f"{number(last.reward_mean)}  {sparkline(rewards)}")
        rows.add_row("loss", f"{number(last.loss)}   grad {number(last.grad_norm)}   lr {number(last.lr)}")
        rows.add_row(
            "staleness", f"{_histogram(self.view.staleness)}   mean {number(mean_lag(self.view.staleness), 2)}"
        )
        rows.add_row("rollout", f"{number(last.rollout_tokens_per_s, 0)} tokens/s   {last.groups_ready} groups ready")
        rows.add_row("step", f"{last.step_s:.2f} s: wait {last.wait_batch_s:.2f}  train {last.train_s:.2f}")

    def _status_table(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for who, text in self._statuses.items():
            table.add_row(Text(who, style="cyan"), Text(text))
        return table if self._statuses else Text("starting processes", style="dim")


def _histogram(counts: dict[int, int]) -> str:
    """``{0: 30, 1: 10}`` -> ``0:75% 1:25%``."""
    total = sum(counts.values())
    return " ".join(f"{lag}:{100 * n / total:.0f}%" for lag, n in sorted(counts.items())) if total else "-"
