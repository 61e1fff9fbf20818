"""Greedy held-out accuracy of a finished run, with stock peft and transformers only.

    .venv/bin/python examples/math/evaluate.py RUN_FOLDER [--base]

``--base`` leaves the adapter off. Nothing of the training or serving path is used, so this is
an independent second opinion on ``eval_after``.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_lora.obs.summary import read_config, read_summary
from areal_lora.tasks.datasets import load_samples
from areal_lora.tasks.rewards import reward_function

BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate the adapter of a run with stock peft and transformers.")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--base", action="store_true", help="evaluate the base model without the adapter")
    arguments = parser.parse_args()
    config, _ = read_config(arguments.run_folder)
    adapter = config.adapters[0]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(config.model.folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(config.model.folder, dtype=config.model.dtype)
    if not arguments.base:
        model = PeftModel.from_pretrained(model, read_summary(arguments.run_folder).adapter_path)
    model = model.to(device).eval()
    path = adapter.reward.path if adapter.reward.kind == "function" else None
    reward = reward_function(adapter.reward.kind, path)
    samples = load_samples(adapter.task, "eval")
    right = 0
    remaining = iter(samples)
    while chunk := list(islice(remaining, BATCH)):
        inputs = tokenizer([s.prompt for s in chunk], return_tensors="pt", padding=True).to(device)
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=adapter.sampling.max_new_tokens, do_sample=False)
        answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(reward(answer, sample.answer) >= 1.0 for answer, sample in zip(answers, chunk, strict=True))
    print(f"accuracy: {right / len(samples):.4f} over {len(samples)} problems")


if __name__ == "__main__":
    main()
