"""The tokenizer without torch, in a process of its own, against the one that transformers loads with torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from areal_lora.tasks.word_problems import word_problem
from tests.support.paths import TINY_MODEL

LOAD = """
import json, sys
from areal_lora.data.tokenizer import load_tokenizer
texts = json.loads(sys.argv[2])
tokenizer = load_tokenizer(sys.argv[1], models=json.loads(sys.argv[3]))
ids = tokenizer(texts)["input_ids"]
found = {"ids": ids, "texts": [tokenizer.decode(row, skip_special_tokens=True) for row in ids]}
found["torch"] = "torch" in sys.modules
import torch
from transformers.utils import is_torch_available
found["models"] = is_torch_available() and torch.tensor(2).item() == 2
print(json.dumps(found))
"""


@pytest.mark.parametrize("models", [False, True])
def test_it_is_the_same_with_and_without_torch(models: bool) -> None:
    texts = [word_problem(0, "eval", index).prompt for index in range(50)]
    command = [sys.executable, "-c", LOAD, str(TINY_MODEL), json.dumps(texts), json.dumps(models)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    ids = AutoTokenizer.from_pretrained(TINY_MODEL)(texts)["input_ids"]
    assert found["ids"] == ids
    assert len(set(map(tuple, ids))) > 40
    assert found["models"] == models
    assert models or not found["torch"], "transformers imported torch"
    assert "PyTorch was not found" not in done.stderr
