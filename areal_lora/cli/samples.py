"""``areal-lora samples RUN``: trained answers of a step with their rewards, also while the run works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from areal_lora.cli.runs import ADAPTER_HELP, RUN_HELP, find_run, run_names
from areal_lora.errors import ConfigError

if TYPE_CHECKING:
    from areal_lora.obs.metrics.records import RolloutSampleRecord, StepRecord


def samples(
    run: Annotated[str, typer.Argument(help=RUN_HELP, autocompletion=run_names)],
    step: Annotated[int | None, typer.Option(metavar="K", min=0, help="the step; the newest if unset")] = None,
    worst: Annotated[bool, typer.Option("--worst", help="lowest rewards first")] = False,
    adapter: Annotated[str | None, typer.Option(metavar="NAME", help=ADAPTER_HELP)] = None,
    count: Annotated[int, typer.Option("-n", "--last", min=1, help="at most so many answers")] = 4,
) -> None:
    """Show the answers that were recorded for a step, its groups, drops and errors.

    `samples/` keeps a few answers of the first and the newest steps.
    """
    from areal_lora.obs.metrics.reader import iter_metrics
    from areal_lora.obs.metrics.records import RolloutSampleRecord, StepRecord

    folder = find_run(run)
    found: dict[int, list[RolloutSampleRecord]] = {}
    steps: dict[tuple[int, str], StepRecord] = {}
    for record in iter_metrics(folder):
        if adapter is not None and record.adapter != adapter:
            continue
        if isinstance(record, RolloutSampleRecord):
            found.setdefault(record.step, []).append(record)
        elif isinstance(record, StepRecord):
            steps[record.step, record.adapter] = record
    if not found:
        raise ConfigError(str(folder.samples), "there is no answer of a trained step", "wait for the end of a step")
    chosen = max(found) if step is None else step
    if chosen not in found:
        kept = f"{min(found)} to {max(found)}" if len(found) > 1 else str(max(found))
        raise ConfigError(f"--step {chosen}", "no answer of it is kept", f"choose among steps {kept}")
    answers = sorted(found[chosen], key=lambda s: s.reward) if worst else found[chosen]
    figures = [_step(steps[key]) for key in sorted(steps) if key[0] == chosen]
    print("\n\n".join([*figures, *(_answer(answer) for answer in answers[:count])]))


def _step(record: StepRecord) -> str:
    from areal_lora.obs.console import number, percent

    lines = [f"step {record.step} of {record.adapter}: reward {number(record.reward_mean)}"]
    if (equal := record.metrics.get("train/groups_equal")) is not None:
        lines[0] += f", {percent(equal)} of groups equal"
    for name, counts in (("dropped", record.dropped), ("retried", record.retried)):
        lines += [f"{name}: " + ", ".join(f"{key} {n}" for key, n in counts.items())] if counts else []
    return "\n".join([*lines, f"faults: {record.faults_text}"] if record.faults else lines)


def _answer(sample: RolloutSampleRecord) -> str:
    gold = "" if sample.gold is None else f", gold {sample.gold}"
    versions = ", ".join(f"v{version}" for version in sample.versions)
    head = f"== {sample.adapter}, step {sample.step}, {versions}: reward {sample.reward:g}{gold}"
    return f"{head}\n-- prompt\n{sample.prompt}\n-- answer\n{sample.completion}"
