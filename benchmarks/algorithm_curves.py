"""Finished runs of one adapter each, by algorithm: a table of held-out accuracy, in Markdown.

    python benchmarks/algorithm_curves.py RUN_FOLDER [RUN_FOLDER ...]

`areal-lora page RUN RUN ...` shows their curves.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_lora.config.models import Config
from areal_lora.obs.metrics.reader import read_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run. ``accuracy`` by version, ``left_out``: largest share of tokens that a step left out
    of the loss because of the behaviour policy."""

    label: str
    seed: int
    accuracy: Mapping[int, float]
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    print(table([read(folder) for folder in parser.parse_args(argv).runs]))


if __name__ == "__main__":
    main()
