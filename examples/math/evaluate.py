"""Greedy held-out accuracy and mean reward of a finished run, with stock peft and transformers only.

    .venv/bin/python examples/math/evaluate.py RUN_FOLDER [--adapter NAME] [--base]

``--adapter`` names one of several, ``--base`` leaves it off. The script uses nothing of the training or serving path:
its figures are an independent check of ``eval_after`` and ``eval_reward_after``. Answers are scored as in the run: in a
process that is killed on a time-out, by the reward's own rule. Prompts that were too long for the run are skipped.
"""

from __future__ import annotations

import argparse
import asyncio
from itertools import islice

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_lora.config.models import AdapterConfig
from areal_lora.config.recorded import adapter_named, read_config
from areal_lora.data.prompts import Formatter
from areal_lora.run_folder.paths import RunFolder
from areal_lora.tasks.datasets import load_samples
from areal_lora.tasks.reward_calls import Score, ScoreItem
from areal_lora.tasks.scorer import RewardSum
from areal_lora.tasks.tally import Answer, estimate

BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate the adapter of a run with stock peft and transformers.")
    parser.add_argument("run_folder", type=RunFolder.of)
    parser.add_argument("--adapter", metavar="NAME", help="which adapter, if the run has several")
    parser.add_argument("--base", action="store_true", help="evaluate the base model without the adapter")
    arguments = parser.parse_args()
    config = read_config(arguments.run_folder)
    adapter = adapter_named(config, arguments.adapter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(config.model.folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(config.model.folder, dtype=config.model.dtype)
    if not arguments.base:
        model = PeftModel.from_pretrained(model, arguments.run_folder.adapter_export(adapter.name))
    model = model.to(device).eval()
    longest = config.rollout.max_model_len - adapter.sampling.max_new_tokens
    samples = load_samples(adapter.task, "eval")
    formatter = Formatter(tokenizer=tokenizer, how=adapter.task.format)
    fitting = [s for s in samples if len(formatter.token_ids(s)) <= longest]
    items = []
    remaining = iter(fitting)
    while chunk := list(islice(remaining, BATCH)):
        inputs = tokenizer.pad({"input_ids": [formatter.token_ids(s) for s in chunk]}, return_tensors="pt").to(device)
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=adapter.sampling.max_new_tokens, do_sample=False)
        answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        items += [ScoreItem.of(s, answer) for answer, s in zip(answers, chunk, strict=True)]
    scores = asyncio.run(score(adapter, items))
    figures = estimate([[Answer(text=i.completion, score=s)] for i, s in zip(items, scores, strict=True)], "")
    if figures.accuracy is not None:
        print(f"accuracy: {figures.accuracy:.4f} over {len(items)} problems")
    if figures.reward_mean is not None:
        print(f"mean reward: {figures.reward_mean:.4f} over {len(items) - figures.unscored} problems")
    print(f"unscored: {figures.unscored}")
    print(f"left out, prompt too long: {len(samples) - len(fitting)}")


async def score(adapter: AdapterConfig, items: list[ScoreItem]) -> list[Score]:
    async with RewardSum(adapter.rewards, adapter.reward_weights) as pool:
        return await pool.score(items)


if __name__ == "__main__":
    main()
