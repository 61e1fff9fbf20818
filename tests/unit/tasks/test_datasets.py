import json
import sys
from pathlib import Path

import pytest

from areal_lora.config.models import Gsm8kTask, WordProblemsTask
from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.tasks.datasets import load_samples
from areal_lora.tasks.rewards import numeric_match
from tests.support.paths import ROOT

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
GOOD = {"question": "How many {n}?", "answer": "1+1=2\n#### 2"}


def task(path: Path, **fields) -> Gsm8kTask:
    return Gsm8kTask(train=str(path), eval=str(path), **fields)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_word_problems_sizes_and_disjoint_splits():
    config = WordProblemsTask(n_train=300, n_eval=200, seed=4)
    train, held_out = load_samples(config, "train"), load_samples(config, "eval")
    assert (len(train), len(held_out)) == (300, 200)
    assert len({s.uid for s in train + held_out}) == 500
    assert not {s.prompt for s in train} & {s.prompt for s in held_out}
    assert load_samples(config, "eval") == held_out


def test_jsonl_rows_become_prompts(tmp_path):
    path = write(tmp_path / "a b.jsonl", json.dumps(GOOD), "", json.dumps({**GOOD, "extra": 1, "answer": "#### 3"}))
    samples = load_samples(task(path, prompt_template=r"{question} End with \boxed{}."), "train")
    assert [s.uid for s in samples] == ["gsm8k/train/0", "gsm8k/train/1"]
    assert samples[0].prompt == r"How many {n}? End with \boxed{}."
    assert samples[1].answer == "#### 3"


def test_only_the_held_out_split_is_cut_to_n_eval(tmp_path):
    path = write(tmp_path / "a.jsonl", *[json.dumps(GOOD)] * 5)
    assert len(load_samples(task(path, n_eval=2), "eval")) == 2
    assert len(load_samples(task(path, n_eval=2), "train")) == 5


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", "not a line of JSON"),
        ("[1, 2]", "no text in field 'question'"),
        (json.dumps({"question": "q"}), "no text in field 'answer'"),
        (json.dumps({"question": 3, "answer": "#### 1"}), "no text in field 'question'"),
        (json.dumps({"question": "q", "answer": "  "}), "no text in field 'answer'"),
        (json.dumps({"question": "q", "answer": "#### many"}), "states no number"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, line, words):
    path = write(tmp_path / "bad.jsonl", json.dumps(GOOD), "", line)
    with pytest.raises(ConfigError, match=words) as caught:
        load_samples(task(path), "train")
    assert caught.value.path == f"{path}:3"
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_utf8_are_named_by_line(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + b'{"question": "caf\xe9", "answer": "#### 1"}\n')
    with pytest.raises(ConfigError, match=r"latin\.jsonl:2"):
        load_samples(task(path), "train")


def test_other_wrong_input(tmp_path):
    empty = write(tmp_path / "empty.jsonl", "")
    with pytest.raises(ConfigError, match="no problems"):
        load_samples(task(empty), "train")
    with pytest.raises(ConfigError, match="no such file"):
        load_samples(task(tmp_path / "missing.jsonl"), "train")
    good = write(tmp_path / "good.jsonl", json.dumps(GOOD))
    with pytest.raises(ConfigError, match=r"prompt_template.*\{question\}"):
        load_samples(task(good, prompt_template="hello"), "train")


class UnreachableHub:
    @staticmethod
    def load_dataset(*_args, **_kwargs):
        raise ConnectionError("cannot reach the hub\nsecond line")


def test_a_hub_name_without_a_hub_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", UnreachableHub)
    with pytest.raises(EnvironmentError_, match=r"openai/gsm8k.*cannot reach the hub.*JSONL") as caught:
        load_samples(Gsm8kTask(), "eval")
    assert "\n" not in str(caught.value)


def test_a_hub_name_without_the_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EnvironmentError_, match="pip install datasets"):
        load_samples(Gsm8kTask(), "train")


@pytest.mark.skipif(not (GSM8K / "test.jsonl").is_file(), reason=f"no GSM8K files in {GSM8K}")
def test_the_real_files_load():
    config = Gsm8kTask(train=str(GSM8K / "train.jsonl"), eval=str(GSM8K / "test.jsonl"))
    train, held_out = load_samples(config, "train"), load_samples(config, "eval")
    assert (len(train), len(held_out)) == (7473, 1319)
    assert all(numeric_match(s.answer, s.answer) == 1.0 for s in held_out)
    assert held_out[0].prompt.startswith("Question: ")
