"""Make `tiny_pupil/`: a 1.0 M-parameter Qwen3-MoE that left school early.

The base model of the harder embedded task (`areal_lora.tasks.word_problems`). It is `make_tiny_model`'s model,
trained from scratch on correctly worked problems of the training split, and stopped long before it can calculate
reliably. Unlike `tiny_model`, which can calculate and was taught to be careless, it has to learn arithmetic: its
reward rises for hundreds of steps, and settings differ in how far it gets.

Usage: ``python examples/math/make_tiny_pupil.py [--out FOLDER] [--steps N]``
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from make_tiny_model import answer_problems, make_model, make_tokenizer, save_tokenizer, training_batch

from areal_lora.tasks.word_problems import WordProblem, draw_problem

SEED = 20_000  # of the training text; runs use small seeds
STEPS, BATCH, LR, WARMUP_STEPS = 800, 64, 2e-3, 40
MAX_NEW_TOKENS = 48


def worked(problem: WordProblem, _: random.Random) -> str:
    return problem.answer


def school(steps: int) -> torch.nn.Module:
    """Next-token training on answers, at a constant rate: stopping earlier gives the same model at that step."""
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01)
    began = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP_STEPS)
        problems = [draw_problem(SEED, "train", index, long=True) for index in range(step * BATCH, (step + 1) * BATCH)]
        input_ids, labels = training_batch(tokenizer, problems, worked, random.Random(0))
        logits = model(input_ids=input_ids).logits  # [N, T, V]
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step + 1 == steps:
            print(f"school {step:5d}/{steps} loss {loss.item():.4f} {time.monotonic() - began:6.0f} s", flush=True)
    return model


def measure(model: torch.nn.Module, groups: int = 64) -> dict[str, float]:
    """Held-out accuracy, and how many groups of 8 samples are neither all right nor all wrong."""
    problems = [draw_problem(0, "eval", index, long=True) for index in range(256)]
    greedy = answer_problems(model, make_tokenizer(), problems, sample=False, max_new_tokens=MAX_NEW_TOKENS)
    drawn = [p for p in problems[:groups] for _ in range(8)]
    sampled = (
        torch.tensor(answer_problems(model, make_tokenizer(), drawn, sample=True, max_new_tokens=MAX_NEW_TOKENS))
        .float()
        .view(groups, 8)
    )
    mixed = (sampled.mean(1) > 0) & (sampled.mean(1) < 1)
    return {
        "greedy_256": sum(greedy) / 256,
        "sampled": sampled.mean().item(),
        "mixed_groups_of_8": mixed.float().mean().item(),
    }


def model_card(steps: int, found: dict[str, float]) -> str:
    """README.md of the model folder, with the figures of this run."""
    lines = [
        "# Tiny Qwen3-MoE that left school early",
        "",
        "The shape and the tokens of `../tiny_model` (1.0 M parameters, fp32). Trained from scratch by",
        f"`../make_tiny_pupil.py` on {steps} steps of {BATCH} correctly worked three-step problems (seed {SEED}, one",
        "thread). It was stopped long before it can calculate reliably; reinforcement learning teaches it.",
        "",
        "Held-out problems (no calculation of theirs occurs in training):",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {value:.3f} |" for key, value in found.items()),
        "",
        "`greedy_256`: greedy accuracy on 256 held-out problems of seed 0; `sampled`: accuracy at temperature 1;",
        "`mixed_groups_of_8`: groups of 8 neither all right nor all wrong.",
        "",
        "Prompt format: `Q: Tom has 4 bags of 17 coins, finds 26 and loses 35. How many now?\\nA:`; the answer is",
        "` 4*17=68 68+26=94 94-35=59 #### 59`.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and save the base model of the harder embedded task.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny_pupil")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums, hence the weights, depend on it
    model = school(args.steps)
    found = measure(model)
    print(found, flush=True)
    model.save_pretrained(args.out)
    save_tokenizer(args.out)
    facts = {"seed": SEED, "steps": args.steps, "batch": BATCH, "lr": LR, "found": found}
    (args.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    (args.out / "README.md").write_text(model_card(args.steps, found), encoding="utf-8")


if __name__ == "__main__":
    main()
