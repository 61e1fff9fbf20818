"""``areal-lora compare RUN RUN``: where two runs differ, in configuration and in figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from areal_lora.cli.recorded_runs import RUN_HELP, find_run, recorded_config, run_names

if TYPE_CHECKING:
    from areal_lora.config.models import Config
    from areal_lora.obs.metrics.records import EvalRecord, StepRecord
    from areal_lora.run_folder.paths import RunFolder

LAST = 10
IGNORED = ("run.name", "run.root")
Row = tuple[str, Any, Any]
Figures = dict[str, float | int | None]


def compare(
    first: Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=run_names)],
    second: Annotated[str, typer.Argument(metavar="RUN", help="another one")],
    adapter: Annotated[str | None, typer.Option(metavar="NAME", help="figures of this adapter only")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Print the keys in which two runs differ, and the figures of both; also while they work."""
    folders = [find_run(first), find_run(second)]
    configs = [recorded_config(folder) for folder in folders]
    ours, theirs = (config.model_dump(mode="json") for config in configs)
    keys = list(differences(ours, theirs))
    mine, others = (figures_of(*pair, adapter) for pair in zip(folders, configs, strict=True))
    rows = [(name, mine.get(name), others.get(name)) for name in dict.fromkeys([*mine, *others])]
    if as_json:
        json.dump({"configuration": keys, "figures": rows}, sys.stdout)
        print()
        return
    names = ("", str(folders[0]), str(folders[1]))
    print(table([names, *(keys or [("(no key differs)", "", "")]), ("", "", ""), *rows]))


def differences(first: Any, second: Any, path: str = "") -> Iterator[Row]:
    """``(dotted key, value, value)`` of what differs; None where a run has no such key."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in [*first, *(key for key in second if key not in first)]:
            yield from differences(first.get(key), second.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for index, pair in enumerate(zip(first, second, strict=True)):
            yield from differences(*pair, f"{path}.{index}")
    elif first != second and path not in IGNORED:
        yield path, first, second


def figures_of(folder: RunFolder, config: Config, adapter: str | None) -> Figures:
    """Figures of the adapter called ``adapter``; without a name of all, after their names where there are several.

    Raises ConfigError where the run has no such adapter.
    """
    from areal_lora.config.adapter_run import adapter_named
    from areal_lora.obs.metrics.reader import read_metrics

    metrics = read_metrics(folder)
    if len(config.adapters) == 1:
        adapter_named(config, adapter)
        return figures(metrics.steps, metrics.evals)
    found: Figures = {}
    for one in [adapter_named(config, adapter)] if adapter else config.adapters:
        mine = figures(
            [step for step in metrics.steps if step.adapter == one.name],
            [record for record in metrics.evals if record.adapter == one.name],
        )
        found |= mine if adapter else {f"{one.name}: {name}": value for name, value in mine.items()}
    return found


def figures(steps: Sequence[StepRecord], evals: Sequence[EvalRecord]) -> Figures:
    """Figures of the curves of one adapter; None: not measured."""
    from areal_lora.obs.metrics.records import mean_lag

    accuracies = [e.accuracy for e in evals if e.accuracy is not None and e.order == 0]
    lags: dict[int, int] = {}
    for step in steps:
        for lag, count in step.staleness.items():
            lags[lag] = lags.get(lag, 0) + count
    return {
        "steps": len(steps),
        "seconds": _last(step.time_s for step in steps),
        "median s of a step": _median(step.step_s for step in steps),
        f"mean reward, first {LAST} steps": _mean(step.reward_mean for step in steps[:LAST]),
        f"mean reward, last {LAST} steps": _mean(step.reward_mean for step in steps[-LAST:]),
        "accuracy, first": accuracies[0] if accuracies else None,
        "accuracy, last": accuracies[-1] if accuracies else None,
        "accuracy, best": max(accuracies, default=None),
        "entropy, last step": _last(step.metrics.get("train/entropy") for step in steps),
        "mean lag of tokens": mean_lag(lags),
        "sampled tokens per s, median": _median(step.metrics.get("train/rollout_tokens_per_s") for step in steps),
    }


def table(rows: Iterable[Row]) -> str:
    """Rows as columns of plain text."""
    cells = [(name, _text(a), _text(b)) for name, a, b in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else "-" if value is None else json.dumps(value)


def _measured(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _last(values: Iterable[float | None]) -> float | None:
    return next(reversed(_measured(values)), None)


def _mean(values: Iterable[float | None]) -> float | None:
    import statistics

    found = _measured(values)
    return statistics.fmean(found) if found else None


def _median(values: Iterable[float | None]) -> float | None:
    import statistics

    found = _measured(values)
    return statistics.median(found) if found else None
