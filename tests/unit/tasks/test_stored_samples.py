"""Rows come back as they were, in any order, from a file that has no name; who reads the same rows shares them."""

from __future__ import annotations

import json
import math
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from areal_lora.config.sections.task import DatasetTask
from areal_lora.errors import ConfigError
from areal_lora.tasks.datasets import load_samples
from areal_lora.tasks.stored_samples import Row, StoredRows, StoredSamples, given_answer
from areal_lora.types import Sample

VALUES: list[dict[str, Any]] = [
    {"n": 2**80, "m": -(2**70), "x": 0.1, "flag": True, "none": None},
    {"text": "\ud800 \u20ac \x00 \n", "list": [1, [2, {"deep": "é"}]]},
    {},
    {"infinite": math.inf},
]


def numbered(index: int, row: Row) -> Sample:
    return Sample(uid=str(index), prompt=row.place, answer=None, columns=row.values)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [Row(f"file:{i}", values) for i, values in enumerate(VALUES)]
    stored = StoredRows(iter(rows), tmp_path)
    assert os.listdir(tmp_path) == []
    assert [stored[i] for i in (3, 1, 0, 2)] == [rows[i] for i in (3, 1, 0, 2)]
    assert len(stored) == 4
    assert len(StoredRows(iter([]), tmp_path)) == 0


def test_samples_are_the_chosen_rows_in_their_order() -> None:
    rng = random.Random(seed := random.randrange(1 << 30))
    rows = StoredRows((Row(f"f:{i}", {"i": i}) for i in range(200)), None)
    chosen = sorted(rng.sample(range(200), 70))
    made = StoredSamples(rows, chosen, numbered)
    assert [s.columns["i"] for s in made] == chosen, f"seed {seed}"
    assert [s.uid for s in made[5:9]] == [str(i) for i in chosen[5:9]]
    assert made[-1].prompt == f"f:{chosen[-1]}"
    with pytest.raises(IndexError):
        made[70]


def task_of(path: Path, **fields: Any) -> DatasetTask:
    return DatasetTask.model_validate({"train": str(path), **fields})


CHAT = {"columns": {"messages": "prompt", "answer": None}, "format": {"kind": "chat"}}


def chat_file(path: Path, prompt: Any) -> DatasetTask:
    path.write_text(json.dumps({"prompt": prompt}) + "\n")
    return task_of(path, eval=str(path), **CHAT)


def test_text_parts_of_messages_are_joined_for_template_reward_and_given_answer(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "1+", "image": None}, {"type": "text", "text": "1?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "2"}]}
    task = chat_file(tmp_path / "rows.jsonl", [{"role": "user", "content": parts}, answer])
    (sample,) = load_samples(task, "train")
    assert (sample.prompt, sample.messages) == ("1+1?", ({"role": "user", "content": "1+1?"},))
    assert given_answer(sample, "prompt") == [{"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "text", "text": "1?"}, {"type": "image_url"}], "part 1 is of type image_url"),
        (["1?"], "part 0 is of type str"),
        ({"text": "1?"}, "type dict, not a text or a list of parts"),
    ],
)
def test_other_content_of_messages_is_refused_with_its_row(tmp_path: Path, content: Any, words: str) -> None:
    task = chat_file(path := tmp_path / "rows.jsonl", [{"role": "user", "content": content}])
    with pytest.raises(ConfigError, match=words) as caught:
        load_samples(task, "train")
    assert caught.value.path == f"{path}:1"


def test_the_fix_for_messages_in_the_wrong_place_or_form(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "1?"}]
    task = chat_file(tmp_path / "rows.jsonl", turns)
    with pytest.raises(ConfigError, match=r"set task\.columns\.messages=prompt"):
        load_samples(task_of(tmp_path / "rows.jsonl", eval=task.eval), "train")
    with pytest.raises(ConfigError, match="'prompt' is text, not a list of messages"):
        load_samples(chat_file(tmp_path / "rows.jsonl", json.dumps(turns)), "train")


def test_the_same_rows_are_stored_once_and_others_apart(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": "1", "level": i % 2}) + "\n" for i in range(20)))

    def rows_of(task: DatasetTask, split: Any = "train") -> StoredRows:
        made = load_samples(task, split, tmp_path)
        assert isinstance(made, StoredSamples)
        held.append(made)
        return made.rows

    held = list[StoredSamples]()
    first = rows_of(task_of(path))
    assert rows_of(task_of(path), "eval") is first
    assert rows_of(task_of(path, format={"template": "Q: {prompt}"}, n_train=3)) is first
    assert held[-1][0].prompt.startswith("Q: p")
    assert rows_of(task_of(path, where={"level": 1})) is not first
    path.write_text(path.read_text() * 2)
    changed = path.stat().st_mtime_ns + 1_000_000_000  # clocks of file systems are coarse
    os.utime(path, ns=(changed, changed))
    assert len(rows_of(task_of(path))) == 40


def test_a_task_that_another_adapter_has_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": "1"}) + "\n" for i in range(20)))
    read, one = list[int](), StoredRows.__getitem__
    monkeypatch.setattr(StoredRows, "__getitem__", lambda rows, index: read.append(index) or one(rows, index))  # type: ignore[func-returns-value]
    held = [load_samples(task_of(path), split, tmp_path) for split in ("train", "eval")]
    assert len(read) >= 20
    read.clear()
    assert load_samples(task_of(path), "train", tmp_path) is held[0]
    assert load_samples(task_of(path), "eval", tmp_path) is held[1]
    assert read == []
    other = load_samples(task_of(path, format={"template": "Q: {prompt}"}), "train", tmp_path)
    assert (other[0].prompt, held[0][0].prompt) == (f"Q: {held[0][0].prompt}", held[0][0].prompt)
    assert len(read) > 16
    os.utime(path, ns=(0, 0))
    assert load_samples(task_of(path), "train", tmp_path) is not held[0]


def test_the_first_problems_are_read_without_the_rest_or_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": "1", "n": i}) + "\n" for i in range(9)) + "broken")
    monkeypatch.setattr(StoredRows, "__init__", None)
    assert [sample.prompt for sample in load_samples(task_of(path), "eval", first=4)] == ["p0", "p1", "p2", "p3"]
    assert [s.prompt for s in load_samples(task_of(path, where={"n": [5, 8]}), "train", first=2)] == ["p5", "p8"]


def test_memory_is_bounded_by_some_bytes_a_row(tmp_path: Path) -> None:
    """20,000 rows of 1 kB: as objects of Python they would be more than 20 MB."""
    n, path = 20_000, tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for i in range(n):
            file.write(json.dumps({"prompt": f"{i:06d}" + "x" * 1000, "answer": "1"}) + "\n")
    tracemalloc.start()
    try:
        made = load_samples(task_of(path), "train", tmp_path)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(made) == n - 256
    assert kept < 100 * n, f"{kept / n:.0f} bytes a row"
