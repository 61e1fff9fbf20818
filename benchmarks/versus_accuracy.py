"""Held-out accuracy of a policy by transformers' greedy ``generate``: the same code for both sides of ``versus.py``.

TRL's side calls `greedy_accuracy` with its own model. Our side is measured after its run, from its checkpoints, by
``python versus_accuracy.py RUN_FOLDER``, which prints the accuracy by version as one JSON object.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from areal_lora.run_folder.paths import RunFolder
from areal_lora.tasks.rewards import numeric_match
from areal_lora.types import Sample


def greedy_accuracy(model: Any, tokenizer: Any, problems: list[Sample], max_new_tokens: int) -> float:
    """Share of held-out problems that the greedy answer gets right."""
    inputs = tokenizer([p.prompt for p in problems], return_tensors="pt", padding=True, add_special_tokens=False)
    training = model.training
    model.eval()
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    model.train(training)
    answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(numeric_match(a, p.answer) for a, p in zip(answers, problems, strict=True)) / len(problems)


def accuracy_of(folder: RunFolder) -> dict[int, float]:
    """Accuracy by version of every checkpoint of a run with one adapter, loaded by stock PEFT."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from areal_lora.checkpoint.checkpoint_store import versions_in
    from areal_lora.checkpoint.recover import pick_version
    from areal_lora.config.recorded import read_config
    from areal_lora.tasks.datasets import load_samples

    config = read_config(folder)
    adapter = config.adapters[0]
    problems = load_samples(adapter.task, "eval")
    tokenizer = AutoTokenizer.from_pretrained(config.model.folder, padding_side="left")
    found = {}
    for version in versions_in(folder.adapter_checkpoints(adapter.name)):
        base = AutoModelForCausalLM.from_pretrained(config.model.folder, dtype=torch.float32)
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "adapter"
            pick_version(folder, config, str(version), None).export(out)
            model = PeftModel.from_pretrained(base, out)
        found[version] = greedy_accuracy(model, tokenizer, problems, adapter.sampling.max_new_tokens)
    return found


if __name__ == "__main__":
    print(json.dumps(accuracy_of(RunFolder.of(sys.argv[1]))))
