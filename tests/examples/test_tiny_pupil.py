"""The base of the harder task: as small and as plain as the other one, and as good as its card says."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from areal_lora.config.load import load_config
from areal_lora.tasks.rewards import numeric_match
from areal_lora.tasks.word_problems import draw_problem
from tests.support.paths import EXAMPLES

FOLDER, OTHER = EXAMPLES / "tiny_pupil", EXAMPLES / "tiny_model"


def test_it_has_the_shape_and_the_tokens_of_the_tiny_model() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 5_000_000
    assert {path.suffix for path in files} <= {".json", ".jinja", ".md", ".safetensors"}
    mine, other = (AutoConfig.from_pretrained(folder).to_dict() for folder in (FOLDER, OTHER))
    assert {k: v for k, v in mine.items() if other[k] != v} in ({}, {"_name_or_path": mine.get("_name_or_path")})
    assert (FOLDER / "tokenizer.json").read_text() == (OTHER / "tokenizer.json").read_text()


def test_greedy_accuracy_is_that_of_its_card() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    model.set_experts_implementation("grouped_mm")
    problems = [draw_problem(0, "eval", index, long=True) for index in range(256)]
    inputs = tokenizer([p.prompt for p in problems], return_tensors="pt", padding=True, return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    accuracy = sum(numeric_match(text, p.answer) for text, p in zip(texts, problems, strict=True)) / len(problems)
    stated = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))["found"]["greedy_256"]
    assert accuracy == pytest.approx(stated, abs=0.02)


def test_the_overlay_leaves_room_for_every_answer() -> None:
    config = load_config(
        [EXAMPLES / f"{name}.yaml" for name in ("gsm8k_grpo_megatron_lora_moe", "embedded", "embedded_long")]
    )
    [adapter] = config.adapters
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    problems = [draw_problem(0, "train", index, long=True) for index in range(2000)]
    longest = max(len(tokenizer.encode(problem.answer)) for problem in problems)
    assert longest < adapter.sampling.max_new_tokens
    prompt = max(len(tokenizer.encode(problem.prompt)) for problem in problems)
    assert prompt + adapter.sampling.max_new_tokens < config.rollout.max_model_len
