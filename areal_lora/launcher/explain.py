"""Output of ``--explain-resume``. Reads the run folder; starts and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from areal_lora.checkpoint.recover import AdapterResume, ResumePlan, explain
from areal_lora.config.adapter_run import steps_of
from areal_lora.config.models import Config
from areal_lora.config.resume import changes, conflict
from areal_lora.config.snapshot import missing_files
from areal_lora.launcher.details import human_bytes
from areal_lora.launcher.start import previous_run, with_absolute_root
from areal_lora.obs.console import duration
from areal_lora.rollout.ledger.peek import reconciliations


def explain_resume(config: Config) -> Iterator[str]:
    """Yield, line by line, the effect of a start with ``config`` on its run folder.

    Raises ConfigError if the start would be refused, CheckpointError if no checkpoint can be used.
    """
    config = with_absolute_root(config)
    folder, steps = config.run_folder, steps_of(config)
    earlier = previous_run(folder)
    if earlier is None:
        yield f"{folder} holds no run: a start would begin a new one. Nothing was started."
        return
    if (error := conflict(earlier.config, config)) is not None:
        raise error
    if earlier.finished(config):
        yield f"The run in {folder} is done: {earlier.steps_done} steps. A start would only report that."
        return
    model = Path(config.model.folder)
    base_is_here = model.is_dir() and not (config.model.commit is not None and missing_files(model))
    plan = explain(folder, config, base_is_here=base_is_here)
    plan.check()
    yield f"The run in {folder} would resume."
    if not base_is_here:
        yield f"  {config.model.path} is not complete in the hub's cache: a start downloads it and compares it then"
    yield from _changes(earlier.config, config)
    versions = {adapter.adapter: adapter.ref.version for adapter in plan.adapters}
    snapshots = {adapter.adapter: adapter.newest.manifest.ledger for adapter in plan.adapters if adapter.newest}
    groups = reconciliations(folder, config.run.name, versions, snapshots)
    for adapter in plan.adapters:
        yield from _adapter(adapter, steps[adapter.adapter])
        yield f"  prompt groups: {groups[adapter.adapter]}"
    yield from _leftovers(plan)
    yield "Nothing was started or changed."


def _changes(before: Config, now: Config) -> Iterator[str]:
    for line in changes(before, now):
        yield f"  changed: {line}"


def _adapter(adapter: AdapterResume, steps: int) -> Iterator[str]:
    version = adapter.ref.version
    if adapter.newest is None:
        yield f"{adapter.adapter}: no checkpoint was written, step 0 of {steps} is next"
        return
    found = adapter.newest
    written = f"{human_bytes(found.nbytes)}, written {duration(found.age_s())} ago"
    following = f"step {version} of {steps} is next" if version < steps else f"all its {steps} steps are made"
    yield f"{adapter.ref}: from {found.path} ({written}), {following}"
    for line in adapter.lines():
        yield f"  {line}"


def _leftovers(plan: ResumePlan) -> Iterator[str]:
    for path in (path for adapter in plan.adapters for path in adapter.leftovers):
        yield f"  {path} was being written when a process died; it would be removed"
