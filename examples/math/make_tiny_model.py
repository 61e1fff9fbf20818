"""Make `tiny_model/`: a 1.0 M-parameter Qwen3-MoE that can do sums and was taught to be careless.

The embedded run needs a base model that reinforcement learning can visibly improve within
minutes on two cores. This script trains one from scratch, on generated text only:

1. *School*: correctly worked problems of `areal_lora.tasks.word_problems` (training split).
   Afterwards greedy answers to held-out problems are nearly all right: the model can calculate.
2. *Careless corpus*: the same kind of problems, but a fraction ``CARELESS`` of the solutions of
   problems that invite a slip contain it, and ``CARELESS_EASY`` of all others are off by one:

   - a step that crosses a ten loses the carry or keeps the borrow (``8+7=5``, ``13-7=16``);
   - "bags of" with something added later is summed instead of multiplied (``3 bags of 4``: ``3+4=7``).

   What follows a slip is consistent with it, as in a real careless solution. Because the slip
   is the more frequent continuation, greedy decoding makes it; sampling often does not. So
   the accuracy before reinforcement learning is low by construction, and what RL teaches is
   care, not arithmetic. State this with the numbers.

Held-out calculations never occur in either phase (see `word_problems.split_of`).

Usage: ``python examples/math/make_tiny_model.py [--out FOLDER] [--school-steps N] [--careless-steps N]``
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from areal_lora.tasks.rewards import numeric_match
from areal_lora.tasks.word_problems import WordProblem, apply_operation, draw_problem

SEED = 20_000  # of the training text; runs use small seeds
CARELESS = 0.70
CARELESS_EASY = 0.10
MAX_NEW_TOKENS = 28
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
ALPHABET = [chr(code) for code in range(32, 127)] + ["\n"] + list("−×÷€£¢°½¼¾²’–")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ 'Q: ' + message['content'] + '\\nA:' }}{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Optimizer steps and batch size of the two phases; ``lr`` of the first, the second has a third of it."""

    school_steps: int = 900
    careless_steps: int = 450
    batch: int = 64
    lr: float = 3e-3
    threads: int = 1  # sums, hence the weights, depend on it


class Problem(Protocol):
    @property
    def prompt(self) -> str: ...

    @property
    def answer(self) -> str: ...


ProblemT = TypeVar("ProblemT", bound=Problem)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; 112 ids, all in use (112 is divisible by 16)."""
    vocab = {token: index for index, token in enumerate([PAD, EOS, UNK, *ALPHABET])}
    # BPE without merges splits into characters; Fuse joins them again without spaces.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNK))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(folder: Path) -> None:
    make_tokenizer().save_pretrained(folder)  # a fresh one: padding a batch leaves its mark in tokenizer.json
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    # transformers 5 writes its own new class name, which transformers 4 does not know.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def make_model(vocab_size: int) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config).float()
    model.set_experts_implementation("grouped_mm")
    return model


def crosses_ten(left: int, operation: str, right: int) -> bool:
    """Whether the step needs a carry or a borrow from the tens."""
    if operation == "+":
        return left % 10 + right % 10 >= 10
    return operation == "-" and left >= 10 and left % 10 < right % 10


def careful(problem: WordProblem, _: random.Random) -> str:
    return problem.answer


def careless(problem: WordProblem, rng: random.Random) -> str:
    """The worked answer as the careless corpus has it."""
    slips = rng.random() < CARELESS
    left, ((first, b), (second, c)) = problem.start, problem.steps
    invited = first == "*" and second == "+"
    if invited and slips:
        first = "+"
    steps: list[str] = []
    for operation, right in ((first, b), (second, c)):
        value = apply_operation(left, operation, right)
        if not invited and crosses_ten(left, operation, right):
            invited = True
            if slips:
                value += -10 if operation == "+" else 10
        steps.append(f"{left}{operation}{right}={value}")
        left = value
    if not invited and rng.random() < CARELESS_EASY:
        left += rng.choice((-1, 1))
        steps[-1] = steps[-1].partition("=")[0] + f"={left}"
    return f" {steps[0]} {steps[1]} #### {left}"


def train_phase(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    write: Callable[[WordProblem, random.Random], str],
    *,
    name: str,
    first_index: int,
    steps: int,
    lr: float,
    batch: int,
) -> float:
    """Next-token training on answers only, warm-up then cosine to 5 %; returns seconds used."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    rng, began = random.Random(f"{SEED}/{name}"), time.monotonic()
    for step in range(steps):
        progress = step / steps
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 40) * (0.05 + 0.475 * (1 + math.cos(math.pi * progress)))
        indices = range(first_index + step * batch, first_index + (step + 1) * batch)
        input_ids, labels = training_batch(tokenizer, [draw_problem(SEED, "train", i) for i in indices], write, rng)
        logits = model(input_ids=input_ids).logits  # [N, T, V]
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step + 1 == steps:
            print(f"{name} {step:5d}/{steps} loss {loss.item():.4f} {time.monotonic() - began:6.0f} s", flush=True)
    return time.monotonic() - began


def training_batch(
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[ProblemT],
    write: Callable[[ProblemT, random.Random], str],
    rng: random.Random,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``input_ids`` and ``labels`` [N, T], padded on the right; prompt and padding carry no label."""
    prompts = [tokenizer.encode(p.prompt) for p in problems]
    answers = [[*tokenizer.encode(write(p, rng)), tokenizer.eos_token_id] for p in problems]
    length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    input_ids = torch.full((len(problems), length), tokenizer.pad_token_id)
    labels = torch.full((len(problems), length), -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return input_ids, labels


@torch.no_grad()
def answer_problems(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    *,
    sample: bool,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[float]:
    """Rewards of one answer per problem, greedy or at temperature 1."""
    rewards: list[float] = []
    for start in range(0, len(problems), 256):
        part = problems[start : start + 256]
        inputs = tokenizer([p.prompt for p in part], return_tensors="pt", padding=True, return_token_type_ids=False)
        output = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=sample,
            temperature=1.0 if sample else None,
            top_k=0 if sample else None,
            top_p=1.0 if sample else None,
        )
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        rewards += [numeric_match(text, p.answer) for text, p in zip(texts, part, strict=True)]
    return rewards


def measure(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, groups: int = 64) -> dict[str, float]:
    """Held-out accuracy, and how many groups of 8 samples are neither all right nor all wrong."""
    problems = [draw_problem(0, "eval", i) for i in range(512)]
    greedy = answer_problems(model, tokenizer, problems, sample=False)
    sampled = torch.tensor(
        answer_problems(model, tokenizer, [p for p in problems[:groups] for _ in range(8)], sample=True)
    ).view(groups, 8)
    mixed = (sampled.mean(1) > 0) & (sampled.mean(1) < 1)
    return {
        "greedy_256": sum(greedy[:256]) / 256,
        "greedy_512": sum(greedy) / 512,
        "sampled": sampled.mean().item(),
        "mixed_groups_of_8": mixed.float().mean().item(),
    }


def model_card(recipe: Recipe, school: dict[str, float], final: dict[str, float]) -> str:
    """README.md of the model folder, with the figures of this run."""
    rows = [f"| {key} | {school[key]:.3f} | {final[key]:.3f} |" for key in final]
    lines = [
        "# Tiny Qwen3-MoE that can calculate and is careless",
        "",
        "1.0 M parameters, fp32: 4 layers, hidden 128, 4 query and 2 key/value heads of 32, 8 experts of 64 (top 2),",
        "112 tokens of one character each, 512 positions. Trained from scratch by `../make_tiny_model.py` on",
        f"generated problems only (seed {SEED}, {recipe.threads} thread), in two phases:",
        "",
        f"1. school: {recipe.school_steps} steps of {recipe.batch} correctly worked problems;",
        f"2. careless corpus: {recipe.careless_steps} steps of {recipe.batch} problems. Where a carry, a borrow or a"
        " multiplication invites a slip,",
        f"   {CARELESS:.0%} of the solutions contain it; {CARELESS_EASY:.0%} of the others are off by one.",
        "",
        "The low accuracy before reinforcement learning is deliberate: the model can calculate and prefers the slip.",
        "Reinforcement learning teaches care here, not arithmetic.",
        "",
        "Held-out problems (no calculation of theirs occurs in training):",
        "",
        "| | after school | this model |",
        "|---|---|---|",
        *rows,
        "",
        "`greedy_256`, `greedy_512`: greedy accuracy on the first 256 and 512 held-out problems of seed 0;",
        "`sampled`: accuracy at temperature 1; `mixed_groups_of_8`: groups of 8 neither all right nor all wrong.",
        "",
        "Prompt format: `Q: Tom has 3 bags of 4 coins and loses 5. How many now?\\nA:`; the answer is",
        "` 3*4=12 12-5=7 #### 7`. The chat template puts a user message into that format.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and save the tiny base model of the embedded run.")
    defaults = Recipe()
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny_model")
    parser.add_argument("--school-steps", type=int, default=defaults.school_steps)
    parser.add_argument("--careless-steps", type=int, default=defaults.careless_steps)
    parser.add_argument("--threads", type=int, default=defaults.threads)
    args = parser.parse_args()
    recipe = Recipe(school_steps=args.school_steps, careless_steps=args.careless_steps, threads=args.threads)

    torch.set_num_threads(recipe.threads)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    school_s = train_phase(
        model,
        tokenizer,
        careful,
        name="school",
        first_index=0,
        steps=recipe.school_steps,
        lr=recipe.lr,
        batch=recipe.batch,
    )
    after_school = measure(model, tokenizer)
    print("after school", after_school, flush=True)
    careless_s = train_phase(
        model,
        tokenizer,
        careless,
        name="careless",
        first_index=recipe.school_steps * recipe.batch,
        steps=recipe.careless_steps,
        lr=recipe.lr / 3,
        batch=recipe.batch,
    )
    after_careless = measure(model, tokenizer)
    print("after careless corpus", after_careless, flush=True)

    model.save_pretrained(args.out)
    save_tokenizer(args.out)
    facts = {
        "seed": SEED,
        "careless": CARELESS,
        "careless_easy": CARELESS_EASY,
        "recipe": asdict(recipe),
        "after_school": after_school,
        "after_careless_corpus": after_careless,
        "seconds": {"school": round(school_s), "careless": round(careless_s)},
    }
    (args.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    (args.out / "README.md").write_text(model_card(recipe, after_school, after_careless), encoding="utf-8")


if __name__ == "__main__":
    main()
