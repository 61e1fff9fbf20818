"""Show the progress of a run in the launcher.

On a terminal, a panel is redrawn at each ``tick``; elsewhere each event is one plain line.
All data comes from the run folder, without a connection to any process.
"""

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_lora.config.sections.task import DEFAULT_SET
from areal_lora.errors import ConfigError
from areal_lora.obs.metrics import records
from areal_lora.obs.metrics.reader import MetricsTail
from areal_lora.obs.run_view import RunView, counted
from areal_lora.processes.log import printable
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import read_statuses
from areal_lora.types import AdapterPhase

QUIET_S = 15.0
"""Time without a record after which process statuses are shown again."""
WIDTH, NAME_WIDTH = 100, 16
"""Columns of a step's line with its time, and of the adapter's name in it."""


def duration(seconds: float) -> str:
    """``75`` -> ``1:15``; ``3725`` -> ``1:02:05``."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, whole = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes}:{whole:02d}"


def human_bytes(n: float) -> str:
    """``1500000`` -> ``1.50 MB`` (decimal units, as link and disk sizes are given)."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1000
    return f"{n:.2f} TB"


class RunOutput(io.TextIOBase):
    """``stream`` for a run that outlives it: a closed pipe or terminal, or a full disk, drops all further text.

    A character that its encoding lacks is escaped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        with contextlib.suppress(io.UnsupportedOperation), open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), self.fileno())


def run_console(*, terminal: bool | None = None) -> Console:
    """The console of a run, on standard output; ``terminal`` None: as that is."""
    return Console(file=cast(IO[str], RunOutput(sys.stdout)), highlight=False, force_terminal=terminal)


def print_line(console: Console, text: str) -> None:
    """One line, however long, with nothing in it taken for markup or a terminal's commands."""
    console.print(printable(text), markup=False, soft_wrap=True)


def number(value: float | None, digits: int = 3) -> str:
    """Format a number; None (not measured) is a dash."""
    return "-" if value is None else f"{value:.{digits}g}" if abs(value) < 1e-3 and value else f"{value:.{digits}f}"


def label(value: float, digits: int = 6) -> str:
    """``0.25``, ``15k``, ``2M``, with so many significant ``digits``."""
    value = float(f"{value:.{digits}g}")
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.4g}{suffix}"
    return f"{value:.6g}"


def brief(value: float | None) -> str:
    """`number` in at most 9 characters."""
    return number(value) if value is None or abs(value) < 1e4 else f"{value:.2e}"


def cut(text: str, width: int) -> str:
    """``text`` in one line without control characters, without its middle where it is longer than ``width``."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= width else f"{text[: width // 2 - 2]}...{text[width // 2 + 1 - width :]}"


def fitted(parts: Sequence[str], width: int) -> str:
    """One line of the first parts that fit ``width`` columns."""
    line, *rest = parts
    for part in rest:
        if len(line) + 2 + len(part) > width:
            break
        line += f"  {part}"
    return line


def token_rates(record: records.StepRecord) -> str:
    """Answer tokens per second of the step, sampled and trained: ``4300/4100 tok/s``."""
    sampled, trained = record.metrics.get("train/rollout_tokens_per_s"), record.trained_tokens
    rates = (sampled, trained / record.step_s if record.step_s else None)
    return f"{'/'.join('-' if rate is None else label(rate, 2) for rate in rates)} tok/s"


def sample_line(record: records.EvalRecord) -> str | None:
    """One of the answers of an evaluation, another one at each version; None where it has none."""
    if not record.samples:
        return None
    sample = record.samples[record.version % len(record.samples)]
    start = f"  answer of v{record.version}, reward {brief(sample.reward)}: {cut(sample.prompt, 30)} -> "
    return start + cut(sample.completion, WIDTH - len(start))


def training_speed(metrics: Mapping[str, float | None]) -> list[str]:
    """Of a trainer device, what is known of ``trains 4321 tok/s/device``, ``mfu 41%``, ``peak 61.2 GiB``."""
    rate, share, peak = (metrics.get(tag) for tag in ("speed/tokens_per_s", "speed/mfu", "memory/peak_gib"))
    found = [] if rate is None else [f"trains {number(rate, 0)} tok/s/device"]
    found += [] if share is None else [f"mfu {percent(share)}"]
    return found + ([] if peak is None else [f"peak {number(peak, 1)} GiB"])


def members_line(record: records.MembersRecord) -> str | None:
    """Which servers joined and left; None if none did (a publish's problem reports losses)."""
    parts = [("joined", record.joined), ("left", record.left)]
    changes = "; ".join(f"{', '.join(names)} {what}" for what, names in parts if names)
    took = "" if record.publish_ms is None else f", sent in {number(record.publish_ms, 0)} ms"
    return f"{changes}: {record.servers} servers serve v{record.version}{took}" if changes else None


class LiveConsole:
    """Call ``start``, then ``tick`` a few times a second, then ``stop``. A tick reads only new records.

    ``steps`` are the training steps of each adapter, None where no one knows.
    """

    def __init__(
        self,
        run_folder: RunFolder,
        steps: Mapping[str, int | None],
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = run_folder
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._tail = MetricsTail(run_folder)
        self._live: Live | None = None
        self._statuses: dict[str, str] = {}
        self._unreadable = self._sample = ""
        self._started = self._changed = clock()
        self.view = RunView(steps)

    def start(self) -> None:
        """Start. Existing records of a resumed run are read but not printed."""
        self._started = self._changed = self._clock()
        while new := self._read_new():
            for record in new:
                self.view.add(record)
        self._statuses = read_statuses(self._folder)
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def tick(self) -> None:
        """Read and show new records and statuses."""
        new, statuses = self._read_new(), read_statuses(self._folder)
        if new:
            self._changed = self._clock()
        problems = [self.view.add(record) for record in new]
        samples = [sample_line(record) for record in new if isinstance(record, records.EvalRecord)]
        self._sample = next((line for line in reversed(samples) if line), self._sample)
        if self._live is not None:
            self._statuses = statuses
            self._live.update(self.render(), refresh=True)
        else:
            self._print_plain(new, problems, statuses)

    def stop(self) -> None:
        """Show the last records and restore the terminal. Idempotent."""
        self.tick()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _read_new(self) -> list[records.Record]:
        """New records; none where they cannot be read, which is printed once in a row."""
        try:
            new, problem = self._tail.read_new(), ""
        except OSError as error:
            new, problem = [], f"{self._tail.path}: {error.strerror or error}"
        except ConfigError as error:
            new, problem = [], str(error)
        if problem and problem != self._unreadable:
            self.note(f"records cannot be shown: {problem}; the run continues")
        self._unreadable = problem
        return new

    def _print_plain(self, new: list[records.Record], problems: list[list[str]], statuses: dict[str, str]) -> None:
        if not self.view.steps or self._clock() - self._changed > QUIET_S:
            for process, text in statuses.items():
                if self._statuses.get(process) != text:
                    self.note(f"{process}: {text}")
        self._statuses = statuses
        for record, found in zip(new, problems, strict=True):
            line = self._plain_line(record)
            for text in [*([line] if line else []), *found]:
                self.note(text)
            if isinstance(record, records.EvalRecord) and (sample := sample_line(record)):
                print_line(self._console, sample)

    def note(self, text: str) -> None:
        # Wrapping would split one event over several lines of a log file.
        print_line(self._console, f"{self._time()}{text}")

    def _time(self) -> str:
        return f"[{duration(self._clock() - self._started)}] "

    def _plain_line(self, record: records.Record) -> str | None:
        name = self.view.prefix(record.adapter)
        match record:
            case records.StepRecord():
                return self._step_line(record)
            case records.EvalRecord():
                which = "" if record.name == DEFAULT_SET else f", {record.name}"
                return f"{name}eval of v{record.version}{which}: {record.figures()}"
            case records.CheckpointRecord() | records.PublishRecord():
                return None
            case records.MembersRecord():
                return members_line(record)
            case records.ResumeRecord():
                return f"{name}resumed from checkpoint v{record.version}"
            case records.AdapterStateRecord():
                reason = f": {record.reason}" if record.reason else ""
                shown = name or record.state is AdapterPhase.FAILED
                return f"{name}{record.state} at v{record.version}{reason}" if shown else None

    def _step_line(self, record: records.StepRecord) -> str:
        """The figures that matter most, as many as fit; the page has all."""
        view, get, left = self.view, record.metrics.get, self.view.remaining_s()
        kl = "" if get("train/kl") is None else f" kl {brief(get('train/kl'))}"
        parts = [
            f"step {counted(record.step + 1, view.adapter(record.adapter).total)}",
            f"reward {brief(record.reward_mean)}",
            f"loss {brief(get('train/loss'))}{kl}",
            f"lag {number(record.mean_lag, 2)}",
            f"{label(record.step_s, 3)} s",
            token_rates(record),
            f"ETA {'-' if left is None else duration(left)}",
        ]
        name = "" if view.only else f"{cut(record.adapter, NAME_WIDTH)}: "
        first, *rest = client_parts(record, view) if record.by_client else parts
        return fitted([name + first, *rest], WIDTH - len(self._time()))

    def render(self) -> RenderableType:
        """The panel for a terminal: progress, the newest lines of each adapter, and what is wrong or waited for."""
        view, progress = self.view, Table.grid(padding=(0, 2))
        left, done, total = view.remaining_s(), view.steps_done, view.total
        bar = ProgressBar(total=total, completed=done if total is None else min(done, total), width=32)
        elapsed, eta = duration(self._clock() - self._started), "-" if left is None else duration(left)
        progress.add_row("steps", bar, counted(done, total), f"elapsed {elapsed}", f"ETA {eta}")
        parts: list[RenderableType] = [progress]
        problems = list(view.problems)
        for name, one in view.adapters.items():
            newest: tuple[records.Record | None, ...] = (one.steps[-1] if one.steps else None, one.last_eval)
            parts += [Text(printable(self._plain_line(record) or "")) for record in newest if record is not None]
            if one.state is AdapterPhase.FAILED:
                problems.append(f"{view.prefix(name)}failed at v{one.steps_done}: {one.reason}")
        parts += [Text(self._sample, style="dim")] if self._sample else []
        parts += [Text(printable(problem), style="bold red") for problem in problems]
        if not view.steps or self._clock() - self._changed > QUIET_S:
            parts += [Text(printable(f"{process}: {text}"), style="dim") for process, text in self._statuses.items()]
            parts += [] if self._statuses else [Text("starting processes", style="dim")]
        return Panel(Group(*parts), title=self._folder.name, title_align="left", border_style="dim")


def client_parts(record: records.StepRecord, view: RunView) -> list[str]:
    """What is known of a client's step: ``step 12``, ``loss 0.310``, ``grad 0.120``, ``lr 0.004``, ..."""
    taken = "" if record.taken else " skipped: its gradient is not finite"
    loss, grad, lr = (brief(record.metrics.get(f"train/{name}")) for name in ("loss", "grad_norm", "lr"))
    parts = [f"step {record.step + 1}{taken}", f"loss {loss}", f"grad {grad}", f"lr {lr}"]
    parts += [f"{record.metrics.get('train/n_tokens') or 0:.0f} tokens"]
    parts += [] if view.only else [f"share {percent(view.shares()[record.adapter])}"]
    return [*parts, f"train {record.spans.get('train', 0.0):.2f} of {record.step_s:.2f} s"]


def histogram(counts: dict[int, int]) -> str:
    """Shares in percent: ``{0: 30, 1: 10}`` -> ``0:75% 1:25%``."""
    total = sum(counts.values())
    return " ".join(f"{lag}:{100 * n / total:.0f}%" for lag, n in sorted(counts.items())) if total else "-"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def eval_text(record: records.EvalRecord | None) -> str:
    """``0.850 (v20)``: accuracy of an evaluation, or mean reward where the task has no rule."""
    if record is None:
        return "-"
    return f"{number(record.reward_mean if record.accuracy is None else record.accuracy)} (v{record.version})"
