"""Finished runs of one adapter each, by algorithm: a table of held-out accuracy, and a picture of the rewards.

    python benchmarks/algorithm_curves.py RUN_FOLDER [RUN_FOLDER ...] [--out PICTURE.svg]

Runs with the same algorithm, engine and rollout mode are one line: the mean over their seeds. Prints Markdown.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_lora.config.models import Config
from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.obs.report.plots import HEIGHT, N_COLOURS, STYLE, WIDTH, Series, line_chart


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run. ``accuracy`` by version, ``rewards`` by step, ``left_out``: largest share of tokens that a step left out
    of the loss because of the behaviour policy."""

    label: str
    seed: int
    accuracy: Mapping[int, float]
    rewards: tuple[float, ...]
    left_out: float


def read(folder: Path) -> Curve:
    """Raises ValueError for a run of several adapters."""
    config = Config.model_validate_json((folder / "config.json").read_text(encoding="utf-8"))
    if len(config.adapters) != 1:
        raise ValueError(f"{folder} has {len(config.adapters)} adapters; the table is for runs of one")
    adapter, metrics = config.adapters[0], read_metrics(folder)
    words = [adapter.algorithm.kind]
    words += ["fsdp"] * (config.trainer.engine == "fsdp") + ["merged"] * (config.rollout.adapter_mode == "merged")
    return Curve(
        label=", ".join(words),
        seed=config.run.seed if adapter.seed is None else adapter.seed,
        accuracy={record.version: record.accuracy for record in metrics.evals},
        rewards=tuple(record.reward_mean for record in metrics.steps),
        left_out=max(record.metrics.get("extra/capped_fraction") or 0.0 for record in metrics.steps),
    )


def table(curves: Sequence[Curve]) -> str:
    versions = sorted({version for curve in curves for version in curve.accuracy})
    lines = [
        f"| algorithm | seed | {' | '.join(f'v{version}' for version in versions)} | tokens left out, at most |",
        "|---|---|" + "---|" * len(versions) + "---|",
    ]
    for curve in sorted(curves, key=lambda curve: (curve.label, curve.seed)):
        cells = [f"{curve.accuracy[version]:.3f}" if version in curve.accuracy else "" for version in versions]
        lines.append(f"| `{curve.label}` | {curve.seed} | {' | '.join(cells)} | {100 * curve.left_out:.2f} % |")
    return "\n".join(lines)


def picture(curves: Sequence[Curve]) -> str:
    """Mean reward of each step's batch, averaged over the seeds of a label as far as all of them go."""
    by_label: dict[str, list[Curve]] = defaultdict(list)
    for curve in curves:
        by_label[curve.label].append(curve)
    lines = [
        Series(
            name=label,
            points=[(step, statistics.mean(rewards)) for step, rewards in enumerate(zip(*(c.rewards for c in found)))],
            colour=i % N_COLOURS,
            dashed=i >= N_COLOURS,
        )
        for i, (label, found) in enumerate(sorted(by_label.items()))
    ]
    return _standalone(line_chart(lines, x_label="training step", y_range=(0.0, 1.0)))


def _standalone(chart: str) -> str:
    """A chart as a file of its own: the style and a background go inside."""
    head, body = chart.split(">", 1)
    paper = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" style="fill:var(--paper)"/>'
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{paper}{body}\n'


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(argv)
    curves = [read(folder) for folder in asked.runs]
    print(table(curves))
    if asked.out is not None:
        asked.out.write_text(picture(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
