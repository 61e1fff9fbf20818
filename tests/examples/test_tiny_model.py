import json
import random
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from areal_lora.tasks.rewards import extract_answer, numeric_match
from areal_lora.tasks.word_problems import draw_problem
from tests.support.paths import EXAMPLES

MATH = EXAMPLES
FOLDER = MATH / "tiny_model"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(MATH))
    import make_tiny_model

    sys.path.remove(str(MATH))
    return make_tiny_model


def test_the_folder_is_small_and_has_no_code():
    files = [p for p in FOLDER.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 5_000_000
    assert {p.suffix for p in files} <= {".json", ".jinja", ".md", ".safetensors"}


def test_architecture_splits_over_ranks():
    config = AutoConfig.from_pretrained(FOLDER)
    assert config.architectures == ["Qwen3MoeForCausalLM"]
    assert config.num_hidden_layers >= 4
    assert (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (8, 2, True)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)
    assert config.vocab_size % 16 == 0
    assert config.max_position_embeddings == 512
    assert config.tie_word_embeddings is False


def test_one_token_per_character_and_text_comes_back(tokenizer):
    texts = [draw_problem(0, "eval", i).prompt + draw_problem(0, "eval", i).answer for i in range(50)]
    texts += ["  two  spaces ", "\n\n a\nb ", "".join(map(chr, range(32, 127))), "£3 − ½", ""]
    for text in texts:
        ids = tokenizer.encode(text)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*tokenizer.encode("a b"), tokenizer.eos_token_id], skip_special_tokens=True) == "a b"
    assert tokenizer.encode("<eos>") == [tokenizer.eos_token_id]
    assert len(tokenizer) == 112


def test_a_chat_message_becomes_the_prompt_it_was_trained_on(tokenizer):
    messages = [{"role": "user", "content": "Tom has 3 bags of 4 coins and loses 5. How many now?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "Q: Tom has 3 bags of 4 coins and loses 5. How many now?\nA:"


def test_greedy_accuracy_leaves_room_to_learn(tokenizer):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    model.set_experts_implementation("grouped_mm")
    problems = [draw_problem(0, "eval", i) for i in range(256)]
    inputs = tokenizer([p.prompt for p in problems], return_tensors="pt", padding=True, return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=28, do_sample=False)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    accuracy = sum(numeric_match(t, p.answer) for t, p in zip(texts, problems, strict=True)) / len(problems)
    stated = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))["after_careless_corpus"]["greedy_256"]
    assert 0.20 <= accuracy <= 0.38
    assert accuracy == pytest.approx(stated, abs=0.02)


def test_careful_text_is_right_and_careless_text_is_wrong_as_often_as_stated(script):
    rng, slips, invited = random.Random(5), 0, 0
    for index in range(3000):
        problem = draw_problem(1, "train", index)
        gold = extract_answer(problem.answer)
        assert extract_answer(script.careful(problem, rng)) == gold
        if invites_a_slip(problem):
            invited += 1
            slips += extract_answer(script.careless(problem, rng)) != gold
    assert invited / 3000 > 0.6
    assert abs(slips / invited - script.CARELESS) < 0.04


def invites_a_slip(problem) -> bool:
    """Whether a step changes the tens, or bags are added to: read from the numbers, not from the script."""
    a, ((first, b), (second, c)) = problem.start, problem.steps
    middle = {"+": a + b, "-": a - b, "*": a * b}[first]
    end = middle + c if second == "+" else middle - c
    first = second == "+" if first == "*" else a // 10 != middle // 10
    return first or middle // 10 != end // 10
