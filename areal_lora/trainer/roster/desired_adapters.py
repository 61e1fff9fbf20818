"""What to do next so that a run has the adapters of its desired state, and whether a joining one can be trained at all.

`next_change` is pure: a plan, one change at a time.

    desired        has                 change
    any            not there           `Join` while servers have room, else `Note` as pending
    paused         pending, active     `Pause`
    active         paused              `Resume`
    deleted, none  there               `Leave`; `Note` as deleted if it never joined

Adapters leave before others join, so that those find a free place. A joining adapter that fails, or an adapter that is
done, is not tried again in a session.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from areal_lora.checkpoint.recover import explain
from areal_lora.config.facts import gather_facts
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.recorded import alone, joined, own_path
from areal_lora.config.rules.adapter_rules import unserved
from areal_lora.config.rules.findings import Severity
from areal_lora.config.rules.guardrails import check, resolve_targets
from areal_lora.data.formatting import load_tokenizer
from areal_lora.errors import ArealLoraError, ConfigErrors
from areal_lora.obs.metrics.reader import state_records
from areal_lora.obs.metrics.records import AdapterStateRecord
from areal_lora.processes.log import get_logger
from areal_lora.run_folder.desired import DesiredAdapter, DesiredAdapters, DesiredPhase, DesiredWatch
from areal_lora.run_folder.paths import RunFolder
from areal_lora.tasks.check import task_problems
from areal_lora.trainer.adapter import probe_rows
from areal_lora.trainer.versions.checkpointing import chosen
from areal_lora.trainer.work import AdapterChange, Join, Leave, Pause, Resume
from areal_lora.types import AdapterPhase

log = get_logger(__name__)

FINAL = (AdapterPhase.DONE, AdapterPhase.DELETED)
"""States that outlast a session; a failed adapter is tried again, as one of the configuration is."""


@dataclass(slots=True, kw_only=True)
class DesiredView:
    """``absent`` are states of adapters that are not there, by key."""

    watch: DesiredWatch
    absent: dict[str, AdapterPhase] = field(default_factory=dict)
    _problem: str = ""

    @property
    def closed(self) -> bool:
        """Whether no further adapter will come."""
        return self.watch.newest.closed

    def look(self) -> DesiredAdapters:
        """The desired state. One that cannot be read is logged, and the one before it counts on."""
        try:
            desired, problem = self.watch.look(), ""
        except ArealLoraError as error:
            desired, problem = self.watch.newest, str(error)
        if problem and problem != self._problem:
            log.error("the desired state is ignored: %s", problem)
        self._problem = problem
        return desired


def desired_view(run_folder: RunFolder) -> DesiredView:
    """The view at the start of a session; what is recorded as done or deleted stays so."""
    newest = {r.adapter: r.state for r in state_records(run_folder) if isinstance(r, AdapterStateRecord)}
    final = {key: state for key, state in newest.items() if state in FINAL}
    return DesiredView(watch=DesiredWatch(run_folder), absent=final)


def prepared(config: Config, run_folder: RunFolder, desired: DesiredAdapter) -> Join:
    """The change that attaches an adapter, which has passed the rules of a start.

    Raises an ArealLoraError that states what is wrong with it, its task or its checkpoints.
    """
    adapter = checked(config, desired)
    single = alone(config, adapter)
    [checkpoint] = chosen(explain(run_folder, single), single)
    rows = probe_rows(config, adapter, load_tokenizer(config.model.folder))
    return Join(adapter=adapter.name, config=adapter.model_dump_json().encode(), probe=rows, checkpoint=checkpoint)


def checked(config: Config, desired: DesiredAdapter) -> AdapterConfig:
    """The settings with resolved targets, by the rules of a start. Raises ConfigError or ConfigErrors."""
    adapter = joined(config, desired)
    # Without the service: its rule is about names that a configuration may give.
    single = alone(config.model_copy(update={"service": None}), adapter)
    facts = gather_facts(single, runs_here=False)
    findings = [f for f in check(single, facts) if f.severity is Severity.ERROR and f.path.startswith("adapters")]
    errors = [finding.error() for finding in findings] or list(task_problems(single, online=True))
    if not errors and (finding := unserved(config, adapter, facts)) is not None:
        errors = [finding.error()]
    if errors:
        raise ConfigErrors([own_path(error) for error in errors])
    return resolve_targets(single, facts).adapters[0]


SERVED = (AdapterPhase.PENDING, AdapterPhase.ACTIVE, AdapterPhase.DRAINING, AdapterPhase.PAUSED)
"""Phases in which an adapter has a place on the servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """An adapter that is not there is in ``phase``; nothing but its state changes."""

    adapter: str
    phase: AdapterPhase
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """What a run has. ``here`` are adapters that have joined and not left, ``absent`` known states of other keys.

    ``configured`` adapters of the configuration have a place on the servers, which hold ``capacity``.
    """

    here: Mapping[str, AdapterPhase]
    absent: Mapping[str, AdapterPhase]
    configured: int = 0
    capacity: int = 1


def next_change(desired: DesiredAdapters, roster: Roster) -> AdapterChange | Note | None:
    """The first difference between what is desired and what is there; None if there is none."""
    wanted = {adapter.key: adapter for adapter in desired.adapters if adapter.phase is not DesiredPhase.DELETED}
    for key in roster.here:
        if key not in wanted:
            return Leave(adapter=key)
    for adapter in desired.adapters:
        if adapter.phase is DesiredPhase.DELETED and roster.absent.get(adapter.key) is not AdapterPhase.DELETED:
            return Note(adapter=adapter.key, phase=AdapterPhase.DELETED)
    for key, phase in roster.here.items():
        paused = wanted[key].phase is DesiredPhase.PAUSED
        if paused and phase in (AdapterPhase.PENDING, AdapterPhase.ACTIVE):
            return Pause(adapter=key)
        if not paused and phase is AdapterPhase.PAUSED:
            return Resume(adapter=key)
    served = roster.configured + sum(phase in SERVED for phase in roster.here.values())
    for key in wanted:
        known = roster.absent.get(key)
        if key in roster.here or known in (AdapterPhase.FAILED, AdapterPhase.DONE):
            continue
        if served < roster.capacity:
            return Join(adapter=key)
        if known is None:
            full = f"waits for a place: servers hold rollout.max_adapters = {roster.capacity}"
            return Note(adapter=key, phase=AdapterPhase.PENDING, reason=full)
    return None
