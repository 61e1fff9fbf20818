"""The state of a run from the records seen so far, of the run and of each adapter, for consoles and commands."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import msgspec

from areal_lora.obs.metrics import records
from areal_lora.obs.warnings import Warnings
from areal_lora.types import AdapterPhase, Correction

PROBLEMS_SHOWN = 3
WINDOW = 20
"""Steps that warnings and the remaining time are computed over."""
KEPT = 512
"""The number of newest steps and publishes in memory; staleness and shares are shown over these steps.

Of an adapter that is deleted its last step and evaluation remain."""


def publish_problem(record: records.PublishRecord) -> str | None:
    """Describe the problem of a publish in one line; None if there is none."""
    if record.version > 0 and not record.differs_from_base:
        return f"publish v{record.version}: the servers still score like the base model"
    if record.probe_mean_abs is None:
        return f"publish v{record.version}: the parity probe returned no finite value"
    return None


def correction_change(steps: Sequence[records.StepRecord]) -> list[str]:
    """A line where the newest of ``steps`` has another behaviour correction than the one before."""
    if len(steps) < 2:
        return []
    before, newest = (step.metrics.get("train/correction") for step in (steps[-2], steps[-1]))
    mean = steps[-2].metrics.get("train/behaviour_mean_abs")
    if before is None or newest is None or mean is None or before == newest:
        return []
    change = " -> ".join(Correction(int(number)).name.lower() for number in (before, newest))
    return [f"behaviour correction {change}: mean |log w| was {mean:.2g}"]


def counted(done: int, total: int | None) -> str:
    """``5/8``, or ``5`` where no end is known."""
    return f"{done}" if total is None else f"{done}/{total}"


def newest_state(recorded: records.AdapterStateRecord | None, steps_done: int, total: int | None) -> AdapterPhase:
    """The recorded state; without one what the steps tell, as after a resume."""
    if recorded is not None:
        return recorded.state
    if total is not None and steps_done >= total:
        return AdapterPhase.DONE
    return AdapterPhase.ACTIVE if steps_done else AdapterPhase.PENDING


class AdapterView:
    """The newest records of one adapter; ``total`` is the number of its training steps, None if that is not known."""

    def __init__(self, total: int | None) -> None:
        self.total = total
        self.steps: deque[records.StepRecord] = deque(maxlen=KEPT)
        self.resumed_at = 0
        self.is_flat = False
        self._faults_shown = 0
        self._warnings = Warnings()
        self._evals: deque[records.EvalRecord] = deque(maxlen=KEPT)
        self._recorded: records.AdapterStateRecord | None = None

    def add(
        self, record: records.StepRecord | records.EvalRecord | records.ResumeRecord | records.AdapterStateRecord
    ) -> None:
        match record:
            case records.StepRecord():
                self.steps.append(record)
                self.is_flat = record.flat
            case records.EvalRecord(order=0):
                self._evals.append(msgspec.structs.replace(record, samples=[]))
            case records.ResumeRecord(version=version):
                self.resumed_at, self._recorded, self.is_flat, self._faults_shown = version, None, False, 0
                self._warnings = Warnings()
                self.steps = deque((s for s in self.steps if s.version < version), maxlen=KEPT)
                self._evals = deque((e for e in self._evals if e.version <= version), maxlen=KEPT)
            case records.AdapterStateRecord(steps=steps):
                self._recorded = record
                self.total = self.total if steps is None else steps
                if record.state is AdapterPhase.DELETED:  # a service has any number of them
                    self.steps = deque([*self.steps][-1:], maxlen=KEPT)
                    self._evals = deque([*self._evals][-1:], maxlen=KEPT)

    def new_problems(self) -> list[str]:
        """Call after each step: warnings, another behaviour correction, and faults of rollouts.

        The last once there are twice as many as when last shown.
        """
        newest, found = self.steps[-1], self._warnings.of(list(self.steps)[-WINDOW:])
        n = sum(newest.retried.get(kind, 0) + newest.dropped.get(kind, 0) for kind in newest.faults)
        if n >= max(1, 2 * self._faults_shown):
            self._faults_shown = n
            found.insert(0, f"rollouts failed: {newest.faults_text}")
        return found + correction_change(self.steps)

    @property
    def last_eval(self) -> records.EvalRecord | None:
        """The newest one of the first set; None as well where a resume superseded all."""
        return self._evals[-1] if self._evals else None

    @property
    def steps_done(self) -> int:
        if self.steps:
            return self.steps[-1].step + self.steps[-1].taken
        if self.total is None:
            return 0  # versions of a client's adapter do not count steps
        return self._recorded.version if self._recorded else self.resumed_at

    @property
    def state(self) -> AdapterPhase:
        return newest_state(self._recorded, self.steps_done, self.total)

    @property
    def reason(self) -> str:
        """Why it is in its state; empty where the state explains itself."""
        return self._recorded.reason if self._recorded else ""

    @property
    def steps_left(self) -> int:
        return max(0, self.total - self.steps_done) if self.state.trains and self.total is not None else 0

    @property
    def mean_lag(self) -> float | None:
        """Mean staleness of the tokens of the newest steps, in versions."""
        return records.mean_lag(records.lag_counts(self.steps))


class RunView:
    """Accumulates the records shown; drawing is separate, so that the state is testable.

    ``totals``: training steps of each adapter, None where no one knows. A record without a name is of the only one.
    """

    def __init__(self, totals: Mapping[str, int | None]) -> None:
        self.adapters = {name: AdapterView(total) for name, total in totals.items()}
        self.steps: deque[records.StepRecord] = deque(maxlen=KEPT)
        """Of all adapters, in the order of training."""
        self.publishes: deque[records.PublishRecord] = deque(maxlen=KEPT)
        self.problems: deque[str] = deque(maxlen=PROBLEMS_SHOWN)
        self.excluded: dict[str, str] = {}
        """Reasons by the name of the server that has no newest version."""
        self.joins = Counter[str]()
        """Times that each server has joined a run in progress; at one of the ``resumes`` all join."""
        self.resumes = 0

    @property
    def only(self) -> AdapterView | None:
        """The adapter of a run that trains one; None if there are several."""
        return next(iter(self.adapters.values())) if len(self.adapters) == 1 else None

    def adapter(self, name: str) -> AdapterView:
        """The adapter called ``name``, or the only one."""
        found = self.adapters.get(name) or (self.only if not name else None)
        return found or self.adapters.setdefault(name, AdapterView(None))

    def prefix(self, name: str) -> str:
        """The start of a line about the adapter: nothing where the run has one."""
        return "" if self.only else f"{name}: "

    def add(self, record: records.Record) -> list[str]:
        """Take in ``record``; returns the problems that it shows."""
        found: list[str | None] = []
        match record:
            case records.StepRecord():
                adapter = self.adapter(record.adapter)
                adapter.add(record)
                self.steps.append(record)
                found = [*adapter.new_problems()]
            case records.EvalRecord() | records.AdapterStateRecord():
                self.adapter(record.adapter).add(record)
            case records.PublishRecord():
                self.publishes.append(record)
                # Without a gradient it equals the base because it has not moved.
                flat = self.adapter(record.adapter).is_flat
                found = [None if flat else publish_problem(record), *self._lost(record)]
            case records.MembersRecord():
                found = [*self._lost(record)]
                self.joins.update(record.joined)
                self.excluded = {name: why for name, why in self.excluded.items() if name not in record.joined}
            case records.CheckpointRecord(failed=True, version=version):
                found = [f"checkpoint v{version} was not written: see the trainer's log, and the room on the disk"]
            case records.ResumeRecord(adapter=name, version=version):
                self.adapter(name).add(record)
                self.steps = deque((s for s in self.steps if s.adapter != name or s.version < version), maxlen=KEPT)
                self.resumes += 1
                self.publishes.clear()  # those were to other processes
                self.excluded.clear()
                self.problems.clear()
        problems = [self.prefix(record.adapter) + problem for problem in found if problem]
        self.problems.extend(problems)
        return problems

    def _lost(self, record: records.PublishRecord | records.MembersRecord) -> list[str]:
        """Which servers were excluded, and why; a publish and the change of members after it name the same."""
        self.excluded |= record.lost
        found = [f"{name} is excluded: {why}" for name, why in record.lost.items()]
        return [text for text in found if self.prefix(record.adapter) + text not in self.problems]

    def shares(self) -> dict[str, float]:
        """Each adapter's part of the trained tokens of the newest steps; 0 for all before the first step."""
        tokens = Counter(dict.fromkeys(self.adapters, 0))
        for step in self.steps:
            tokens[step.adapter] += step.trained_tokens
        total = tokens.total()
        return {name: n / total if total else 0.0 for name, n in tokens.items()}

    @property
    def steps_done(self) -> int:
        return sum(adapter.steps_done for adapter in self.adapters.values())

    @property
    def total(self) -> int | None:
        """Training steps of all adapters; of one without a known end, those that it has made. None: no end is known."""
        if self.adapters and all(adapter.total is None for adapter in self.adapters.values()):
            return None
        return sum(max(adapter.total or 0, adapter.steps_done) for adapter in self.adapters.values())

    def remaining_s(self) -> float | None:
        """Remaining seconds at the pace of the last steps since a resume; None before the second, or without an end.

        Adapters take turns, so the pace is that of the run, and the steps left are those of all adapters.
        """
        if self.total is None:
            return None
        since = [step for step in self.steps if step.version >= self.adapter(step.adapter).resumed_at]
        recent = since[-WINDOW - 1 :]
        if len(recent) < 2:
            return None
        pace = (recent[-1].time_s - recent[0].time_s) / (len(recent) - 1)
        return sum(adapter.steps_left for adapter in self.adapters.values()) * max(0.0, pace)
