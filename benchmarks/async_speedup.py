"""Simulated speed-up of asynchronous training: ``python benchmarks/async_speedup.py [--plot SVG]``; about 8 minutes.

Synchronous: all GPUs sample a batch until its longest answer ends, then all train it. Asynchronous: the simulated run
(`areal_lora.launcher.simulation`) with the best split of as many GPUs. Seconds are those of an 8 B model on H100s by
arithmetic; the trainer is made slower or faster until sampling has the wanted share of the synchronous step.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.families.registry import known_config
from areal_lora.families.shape import ModelShape
from areal_lora.launcher.simulation.cost_model import CostModel, VirtualLoop, VirtualServer, arithmetic
from areal_lora.launcher.simulation.simulate import Scenario, simulate

EXAMPLE = Path(__file__).parents[1] / "examples" / "math" / "gsm8k_grpo_megatron_lora_dense.yaml"
GPUS, PROMPTS, SAMPLES, STEPS = 16, 64, 16, 16
PROMPT_TOKENS = 300
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
SPLITS = (0.8, 1.0, 1.25, 1.5)
"""Trainer ranks of an asynchronous run, in parts of those that the share of training would take."""


@dataclass(frozen=True)
class Law:
    """Lengths of answers: lognormal, cut at ``longest`` tokens."""

    name: str
    mean: float
    sigma: float
    longest: int


@dataclass(frozen=True)
class Published:
    """A measured speed-up; ``share``: of sampling in its synchronous step, where that is known."""

    name: str
    speedup: float
    share: float | None = None


LAWS = (
    Law("long tail: mean 2 k, cut at 28 k", 2000, 1.2, 28_000),
    Law("short tail: mean 3.2 k, cut at 4 k", 3200, 0.3, 4096),
)
PUBLISHED = (
    Published("verl, 7B, 32 GPUs, 28 k", 790.10 / 294.77, 357.41 / 790.10),
    Published("verl, 7B, 64 GPUs, 28 k", 365.28 / 189.26, 150.72 / 365.28),
    Published("verl, 7B, 128 GPUs, 28 k", 356.30 / 150.63, 177.85 / 356.30),
    Published("areal_lora, two CPU cores, staleness 4", 2.03 / 1.16, 2.7 / 5.2),
    Published("AReaL, at most, 28 k", 2.77),
    Published("NeMo-RL, 30B-A3B 1.26, 8B 1.31, 4 k", 97.7 / 74.6),
)


def job(law: Law, staleness: int) -> tuple[Config, CostModel]:
    config = load_config(
        [EXAMPLE],
        [
            f"adapters.0.sampling.prompts_per_step={PROMPTS}",
            f"adapters.0.sampling.n_samples={SAMPLES}",
            f"adapters.0.sampling.max_new_tokens={law.longest}",
            f"rollout.max_model_len={law.longest + 1024}",
            f"rollout.max_staleness={staleness}",
            "rollout.max_num_seqs=256",
            "rollout.tp=1",
        ],
    )
    shape = ModelShape.from_hf(known_config(str(config.model.path)) or {})
    costs = arithmetic(config, shape)
    context = PROMPT_TOKENS + law.mean * math.exp(law.sigma**2) / 2  # of a sampled token: E[L^2] / 2 E[L]
    return config, replace(
        costs,
        answer_tokens=law.mean,
        sigma=law.sigma,
        prompt_tokens=PROMPT_TOKENS,
        sampled_token_s=costs.sampled_token_s * context / (0.75 * law.longest),  # most of it reads keys and values
    )


def sampling_s(config: Config, costs: CostModel, servers: int) -> float:
    """Seconds in which ``servers`` sample one batch."""

    async def sample() -> float:
        loop = asyncio.get_running_loop()
        made = [VirtualServer(costs, config.rollout.max_num_seqs, 1.0) for _ in range(servers)]
        async with asyncio.TaskGroup() as tasks:
            for i in range(PROMPTS):
                tasks.create_task(made[i % servers].generate(costs.lengths(f"1 {i}", SAMPLES)))
        return loop.time()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(sample())


def speedups(law: Law, staleness: int) -> list[float]:
    config, costs = job(law, staleness)
    sampled_s = sampling_s(config, costs, GPUS)
    tokens = PROMPTS * (SAMPLES * law.mean + PROMPT_TOKENS)
    found = list[float]()
    for share in SHARES:
        trained_s = sampled_s * (1 - share) / share
        paced = replace(costs, trained_token_s=trained_s * GPUS / tokens)
        steps = (
            simulate(config, paced, Scenario(servers=GPUS - ranks, ranks=ranks, steps=STEPS)).steps_per_hour
            for ranks in sorted({min(GPUS - 1, max(1, round(GPUS * (1 - share) * part))) for part in SPLITS})
        )
        found.append(max(steps) * (sampled_s + trained_s) / 3600)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path, help="write a picture (needs matplotlib)")
    args = parser.parse_args()
    curves = dict[tuple[str, int], list[float]]()
    print("share of sampling".ljust(54), *(f"{share:.0%}" for share in SHARES))
    for law, k in itertools.product(LAWS, (1, 4)):
        curves[law.name, k] = values = speedups(law, k)
        print(f"{law.name}, staleness {k}".ljust(54), *(f"{value:.2f}" for value in values), flush=True)
    if args.plot:
        plot(args.plot, curves)


def plot(path: Path, curves: dict[tuple[str, int], Sequence[float]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2))
    for (name, k), values in curves.items():
        axes.plot(
            SHARES,
            values,
            "-" if k > 1 else "--",
            color=f"C{[law.name for law in LAWS].index(name)}",
            label=f"{name}, staleness {k}",
        )
    for each in PUBLISHED:
        if each.share is None:
            axes.axhline(each.speedup, color="grey", linewidth=0.7, linestyle=":")
            axes.annotate(each.name, (SHARES[-1], each.speedup), ha="right", va="bottom", fontsize=7)
        else:
            axes.plot(each.share, each.speedup, "kx")
            axes.annotate(each.name, (each.share, each.speedup), xytext=(4, 3), textcoords="offset points", fontsize=7)
    axes.set(xlabel="share of sampling in the synchronous step", ylabel="speed-up over synchronous")
    axes.legend(fontsize=7, loc="upper right", bbox_to_anchor=(1, 0.95))
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
