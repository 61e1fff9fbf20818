"""Rows of every kind of file, and what is said of a file that is none."""

from __future__ import annotations

import csv
import datetime
import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.tasks.datasets import RowSource, read_rows
from tests.support.lazy import Lazy

datasets = Lazy("datasets")

ROWS: list[dict[str, Any]] = [{"problem": "1+1=", "level": 1}, {"problem": '2, "2"\n=', "level": 2}]


def jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def as_json(path: Path) -> None:
    path.write_text(json.dumps(ROWS, indent=1))


def as_csv(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(ROWS)


def parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


def rows_of(path: Path | str, **more: Any) -> list[dict[str, Any]]:
    return [row.values for row in read_rows(RowSource(path=str(path), key="task.train", **more))]


@pytest.mark.parametrize(
    ("name", "write"),
    [("a b.jsonl", jsonl), ("a.json", as_json), ("a.csv", as_csv), ("a.tsv", as_csv), ("A.PARQUET", parquet)],
)
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, name: str, write: Any) -> None:
    write(tmp_path / name)
    found = rows_of(tmp_path / name)
    assert [(row["problem"], int(row["level"])) for row in found] == [(r["problem"], r["level"]) for r in ROWS]


def test_folders_saved_and_of_files(tmp_path: Path) -> None:
    made = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    )
    made.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "files").mkdir()
    jsonl(tmp_path / "files" / "train.jsonl")
    jsonl(tmp_path / "files" / "test.jsonl")
    assert rows_of(tmp_path / "saved", split="train") == ROWS
    assert rows_of(tmp_path / "saved", split="test") == ROWS[:1]
    assert rows_of(tmp_path / "files", split="test") == ROWS
    with pytest.raises(ConfigError, match=r"task\.train: .*files"):
        rows_of(tmp_path / "files", split="validation")


def test_values_that_json_lacks_become_text_or_nothing(tmp_path: Path) -> None:
    day = datetime.date(2026, 1, 2)
    table = pyarrow.Table.from_pylist([{"day": day, "image": b"\x89PNG", "nested": {"list": [1.5, None]}}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == [{"day": "2026-01-02", "image": None, "nested": {"list": [1.5, None]}}]


def test_rows_can_be_sent_whatever_json_has(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"half \ud83d": ["\ud83d!"], "most": [2**64 - 1, -(2**63), 2**64]}))
    found = rows_of(tmp_path / "a.jsonl")
    assert found == [{"half ?": ["?!"], "most": [2**64 - 1, -(2**63), str(2**64)]}]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found)) == found


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a":\n', r"a\.jsonl:3: not a line of JSON"),
        pytest.param("a.jsonl", '{"a": ' + "[" * 100_000, r"a\.jsonl:1: not a line of JSON", id="deep lines"),
        pytest.param("a.json", "[" * 100_000, "not JSON", id="deep"),
        pytest.param("a.jsonl", '{"a": ' + "[" * 900 + "]" * 900 + "}", r"a\.jsonl:1: is nested too", id="deep row"),
        ("a.jsonl", "[1]\n", r"a\.jsonl:1: is a list, not an object"),
        ("a.json", '{"a": 1}', "holds no list of objects"),
        ("a.json", "{", "not JSON"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", r"a\.csv:3: has another number of fields"),
        ("a.csv", "a,b\n1\n", r"a\.csv:2: has another number of fields"),
        ("a.csv", "a,b,a\n1,2,3\n", r"a\.csv: has two columns 'a'"),
        ("a.parquet", "PAR1", "not a parquet file"),
        ("a.txt", "x", "no file of a known kind"),
    ],
)
def test_a_broken_file_is_one_line_with_its_place(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        rows_of(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_field_of_a_csv_file_may_be_long_and_a_column_nameless(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"a,,\n{'x' * 200_000},,\n")
    assert rows_of(tmp_path / "a.csv") == [{"a": "x" * 200_000, "": ""}]


@pytest.mark.parametrize("how", ["damaged", "not UTF-8", "of a zone that is not known", "two columns of a name"])
def test_a_parquet_file_that_cannot_be_read_to_its_end_is_named(tmp_path: Path, how: str) -> None:
    path, texts = tmp_path / "a.parquet", pyarrow.array([f"text {i}" * 200 for i in range(100)])
    columns = {"a": texts}
    if how.startswith("of a zone"):
        columns |= {"at": pyarrow.array(range(100), pyarrow.timestamp("us", tz="No/Where"))}
    table = pyarrow.table(columns)
    if how.startswith("two"):
        table = pyarrow.Table.from_arrays([texts, texts], names=["a", "a"])
    pyarrow.parquet.write_table(table, path, compression=None, use_dictionary=False, write_statistics=False)
    data = bytearray(path.read_bytes())
    if how == "damaged":
        data[8 : len(data) // 2] = bytes(len(data) // 2 - 8)
    elif how == "not UTF-8":
        data = data.replace(b"text 42", b"text \xff2")
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"a\.parquet(\[\d+\]: cannot be read|: has two columns 'a')") as caught:
        rows_of(path)
    assert str(path) in str(caught.value)


def test_a_hub_name_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(EnvironmentError_, match="nobody/nothing: not a file, and the hub did not give it") as caught:
        rows_of("nobody/nothing")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"task\.train: there/is/none: no such file"):
        rows_of("there/is/none")
