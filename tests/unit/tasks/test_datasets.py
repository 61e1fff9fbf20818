import json
import random
import sys
from pathlib import Path

import pytest

from areal_lora.config.sections.task import DatasetTask, PromptFormat, WordProblemsTask
from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.tasks.datasets import load_samples
from areal_lora.tasks.rewards import numeric_match
from tests.support.paths import ROOT

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
GOOD = {"question": "How many {n}?", "answer": "1+1=2\n#### 2"}


def task(path: Path, **fields) -> DatasetTask:
    return DatasetTask(kind="gsm8k", train=str(path), eval=str(path), **fields)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_word_problems_sizes_and_disjoint_splits():
    config = WordProblemsTask(n_train=300, n_eval=200)
    train, held_out = load_samples(config, "train"), load_samples(config, "eval")
    assert (len(train), len(held_out)) == (300, 200)
    assert len({s.uid for s in train + held_out}) == 500
    assert not {s.prompt for s in train} & {s.prompt for s in held_out}
    assert list(load_samples(config, "eval")) == list(held_out)


def test_jsonl_rows_become_prompts(tmp_path):
    path = write(tmp_path / "a b.jsonl", json.dumps(GOOD), "", json.dumps({**GOOD, "extra": 1, "answer": "#### 3"}))
    samples = load_samples(task(path, format=PromptFormat(template=r"{question} End with \boxed{}.")), "train")
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
        ("[1, 2]", "is a list, not an object with columns"),
        (json.dumps({"question": "q"}), "no column 'answer'.*set task.columns.answer"),
        (json.dumps({"answer": "#### 1"}), "no column 'question'"),
        (json.dumps({"question": 3, "answer": "#### 1"}), "no text in column 'question'"),
        (json.dumps({"question": "q", "answer": "  "}), "no text in column 'answer'"),
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


class UnreachableHub:
    @staticmethod
    def load_dataset(*_args, **_kwargs):
        raise ConnectionError("cannot reach the hub\nsecond line")


def test_a_hub_name_without_a_hub_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", UnreachableHub)
    with pytest.raises(EnvironmentError_, match=r"openai/gsm8k.*cannot reach the hub.*JSONL") as caught:
        load_samples(DatasetTask(kind="gsm8k"), "eval")
    assert "\n" not in str(caught.value)


def test_a_hub_name_without_the_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EnvironmentError_, match="pip install datasets"):
        load_samples(DatasetTask(kind="gsm8k"), "train")


@pytest.mark.skipif(not (GSM8K / "test.jsonl").is_file(), reason=f"no GSM8K files in {GSM8K}")
def test_the_real_files_load():
    config = DatasetTask(kind="gsm8k", train=str(GSM8K / "train.jsonl"), eval=str(GSM8K / "test.jsonl"))
    train, held_out = load_samples(config, "train"), load_samples(config, "eval")
    assert (len(train), len(held_out)) == (7473, 1319)
    assert all(numeric_match(s.answer, s.answer) == 1.0 for s in held_out)
    assert held_out[0].prompt.startswith("Question: ")


ROWS = [
    {"problem": "one", "solution": "1", "level": 1, "hint": "{x}"},
    {"problem": "two", "solution": ["2", "II"], "level": 2, "hint": "b"},
    {"problem": "six", "solution": None, "level": 3, "hint": "c"},
]


def general(tmp_path: Path, rows=ROWS, **fields) -> DatasetTask:
    path = write(tmp_path / "rows.jsonl", *map(json.dumps, rows))
    columns = fields.pop("columns", {"prompt": "problem", "answer": "solution"})
    return DatasetTask.model_validate({"train": str(path), "eval": str(path), "columns": columns, **fields})


def test_columns_have_any_name_and_answers_any_type(tmp_path):
    made = load_samples(
        general(tmp_path, format={"kind": "template", "template": "Q: {problem} ({level}) {other}"}), "train"
    )
    assert [s.prompt for s in made] == ["Q: one (1) {other}", "Q: two (2) {other}", "Q: six (3) {other}"]
    assert [s.answer for s in made] == ["1", ["2", "II"], None]
    assert [s.gold for s in made] == ["1", '["2", "II"]', ""]
    assert made[0].columns == ROWS[0]
    assert made[0].messages is None
    assert [s.uid for s in made] == ["dataset/train/0", "dataset/train/1", "dataset/train/2"]


def test_the_named_column_is_the_prompt_also_beside_one_called_prompt(tmp_path):
    turns = [{"role": "user", "content": "old"}]
    for old in ("old", turns):
        rows = [{"prompt": old, "info": {"question": "new"}, "answer": "1", "hint": "h"}] * 2
        for template in ("{prompt} {hint}", "{info.question} {hint}"):
            fields = {"columns": {"prompt": "info.question"}, "format": {"template": template}}
            assert [s.prompt for s in load_samples(general(tmp_path, rows, **fields), "train")] == ["new h"] * 2


def test_a_field_of_an_object_fills_a_template(tmp_path):
    rows = [{**row, "meta": {"hint": "carry {level}"}} for row in ROWS[:1]]
    made = load_samples(general(tmp_path, rows, format={"template": r"{problem} ({meta.hint}) \boxed{x.y}"}), "train")
    assert [s.prompt for s in made] == [r"one (carry {level}) \boxed{x.y}"]


def test_a_placeholder_is_any_column_of_the_row(tmp_path):
    rows = [
        {"Task Id": "a-1", "Problem (raw)": "one", "meta": {"sub-topic": "x", "level": 1}, "": "nameless", "A.B": 2}
    ]
    text = r"{Task Id} {prompt} {meta.sub-topic}, {meta.level} {A.B} {} {Task} {task-id} \boxed{Task Id}"
    fields = {"columns": {"prompt": "Problem (raw)", "answer": None}, "format": {"template": text}}
    made = load_samples(general(tmp_path, rows, **fields), "train")
    assert made[0].prompt == r"a-1 one x, 1 2 {} {Task} {task-id} \boxed{Task Id}"


def test_arguments_of_latex_commands_and_names_in_spaces_stay_beside_columns_of_almost_that_name(tmp_path):
    rows = [{**row, "answers": ["4"], "case": "4", "answer": "4"} for row in ROWS]
    text = r"\boxed{answer} \boxed{answers.x} \begin{cases} \operatorname*{case} { solutions }"
    made = load_samples(general(tmp_path, rows, format={"template": "{problem} \\n{case} " + text}), "train")
    assert made[0].prompt == r"one \n4 " + text


@pytest.mark.parametrize("wrong", ["porblem", "problems", "meta.hnt", "meta.other", "promt"])
def test_a_misspelled_placeholder_is_refused_beside_a_right_one(tmp_path, wrong):
    rows = [{**row, "meta": {"hint": "x"}} for row in ROWS]
    with pytest.raises(
        ConfigError, match=rf"template: {{{wrong}}} is no column of .*:1 .*{{problem}}.*{{meta.hint}}.*{{ {wrong} }}"
    ):
        load_samples(general(tmp_path, rows, format={"template": "{problem} {" + wrong + "}"}), "train")


def test_no_answer(tmp_path):
    columns = {"prompt": "problem", "answer": None}
    made = load_samples(general(tmp_path, columns=columns, n_eval=2), "eval")
    assert [(s.uid, s.answer) for s in made] == [("dataset/eval/0", None), ("dataset/eval/1", None)]


def test_a_column_may_be_a_field_of_an_object(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "1+1"}], "reward_model": {"ground_truth": "2"}, "info": {"split": "a"}},
        {"prompt": [{"role": "user", "content": "1+2"}], "reward_model": {"ground_truth": "3"}, "info": {"split": "b"}},
    ]
    columns = {"messages": "prompt", "answer": "reward_model.ground_truth"}
    fields = {"columns": columns, "format": {"kind": "chat"}, "where": {"info.split": "b"}}
    (made,) = load_samples(general(tmp_path, rows, **fields), "train")
    assert (made.prompt, made.answer, made.columns) == ("1+2", "3", rows[1])
    rows[1]["reward_model.ground_truth"] = "a column's own name comes first"
    (made,) = load_samples(general(tmp_path, rows, **fields), "train")
    assert made.answer == "a column's own name comes first"
    with pytest.raises(
        ConfigError, match=r"no column 'reward_model.truth' .*reward_model\.ground_truth, info, info.split"
    ):
        load_samples(
            general(tmp_path, rows[1:], **fields | {"columns": {**columns, "answer": "reward_model.truth"}}), "train"
        )


def test_chat_puts_the_system_prompt_first_and_keeps_given_messages(tmp_path):
    chat = {"kind": "chat", "system_prompt": "Think.", "template": "Solve {problem}."}
    made = load_samples(general(tmp_path, format=chat), "train")
    assert made[0].messages == ({"role": "system", "content": "Think."}, {"role": "user", "content": "Solve one."})
    turns = [{"role": "system", "content": "Own."}, {"role": "user", "content": "Hi", "name": "a"}]
    rows = [{"m": turns}, {"m": turns[1:]}]
    columns = {"messages": "m", "answer": None}
    first, second = load_samples(general(tmp_path, rows, columns=columns, format=chat), "train")
    assert first.messages == tuple(turns)
    assert second.messages == ({"role": "system", "content": "Think."}, turns[1])
    assert second.prompt == "Hi"


def test_rows_are_chosen_by_value_and_by_a_function(tmp_path):
    assert len(load_samples(general(tmp_path, where={"level": [1, 3]}), "train")) == 2
    (tmp_path / "row_filter.py").write_text("def keep(row):\n    return row['level'] / (row['level'] - 3) < 0\n")
    keep = f"{tmp_path / 'row_filter.py'}:keep"
    assert [s.prompt for s in load_samples(general(tmp_path, ROWS[:2], keep=keep, where={"level": 2}), "train")] == [
        "two"
    ]
    with pytest.raises(ConfigError, match=r"rows\.jsonl:3: .*keep fails: ZeroDivisionError"):
        load_samples(general(tmp_path, keep=keep), "train")
    with pytest.raises(ConfigError, match="no row passes the filter"):
        load_samples(general(tmp_path, where={"level": 9}), "train")


def test_an_empty_file_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no problems in this file"):
        list(load_samples(DatasetTask(train=str(tmp_path / "rows.jsonl")), "train"))


def test_without_a_held_out_file_rows_are_held_out_once_and_for_all(tmp_path):
    rows = [{"prompt": str(i), "answer": str(i)} for i in range(50)]
    task_of = lambda **more: general(tmp_path, rows, columns={}, eval=None, **more)  # noqa: E731
    train, held_out = load_samples(task_of(), "train"), load_samples(task_of(), "eval")
    assert (len(train), len(held_out)) == (40, 10)
    assert {s.prompt for s in train} | {s.prompt for s in held_out} == {str(i) for i in range(50)}
    assert [s.prompt for s in load_samples(task_of(), "eval")] == [s.prompt for s in held_out]
    with pytest.raises(ConfigError, match="50 of 50 rows would be held out"):
        load_samples(task_of(n_eval=50), "eval")


@pytest.mark.parametrize("chat", [False, True])
def test_no_copy_of_a_held_out_prompt_is_trained_on(tmp_path, chat):
    """Of the others every row is, in the order of the file. Chats of other system prompts are no copies."""
    texts = [f"p{i // 4}" if i % 4 else f"single {i}" for i in range(200)]
    turns = [[{"role": "system", "content": str(i % 2)}, {"role": "user", "content": t}] for i, t in enumerate(texts)]
    rows = [{"prompt": t, "turns": m, "answer": "1"} for t, m in zip(texts, turns, strict=True)]
    how = {"columns": {"messages": "turns"}, "format": {"kind": "chat"}} if chat else {"columns": {}}
    task = general(tmp_path, rows, eval=None, **how)
    train, held_out = load_samples(task, "train"), load_samples(task, "eval")
    chosen = sorted(random.Random("held out").sample(range(200), 40))
    assert [s.uid for s in held_out] == [f"dataset/eval/{i}" for i in chosen], "as without copies"
    asked = [str(row["turns"]) if chat else row["prompt"] for row in rows]
    shown = {asked[i] for i in chosen}
    kept = [i for i in range(200) if asked[i] not in shown]
    assert 100 < len(kept) < 160
    assert [s.uid for s in train] == [f"dataset/train/{i}" for i in kept]
    first = general(tmp_path, rows, eval=None, n_train=7, **how)
    assert [s.uid for s in load_samples(first, "train")] == [s.uid for s in train[:7]]


def test_rows_of_one_prompt_that_differ_in_other_columns_are_no_copies(tmp_path):
    rows = [{"prompt": "Play one game.", "level": i % 4, "seed": i // 8} for i in range(200)]  # each one twice
    task = general(tmp_path, rows, columns={"answer": None}, eval=None)
    train, held_out = load_samples(task, "train"), load_samples(task, "eval")
    copies = {(s.columns["level"], s.columns["seed"]) for s in held_out}
    assert len(held_out) == 40
    assert len(train) == sum((row["level"], row["seed"]) not in copies for row in rows) > 100


def test_a_file_of_one_problem_is_trained_on(tmp_path):
    task = general(tmp_path, [{"prompt": "p", "answer": "1"}] * 20, columns={}, eval=None)
    assert len(load_samples(task, "eval")) == 4
    assert len(load_samples(task, "train")) == 16


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"columns": {"prompt": "question"}},
            r"rows\.jsonl:1: no column 'question' .*one of: problem, solution, level",
        ),
        ({"columns": {"prompt": "problem"}}, r"no column 'answer' .*task.columns.answer \(or null\)"),
        ({"columns": {"prompt": "level", "answer": None}}, "no text in column 'level'"),
        ({"columns": {"messages": "problem", "answer": None}, "format": {"kind": "chat"}}, "not a list of messages"),
        ({"format": {"kind": "template", "template": "plain"}}, r"task.format.template: names no column"),
        ({"where": {"lvl": 1}}, "no column 'lvl' .*task.where"),
    ],
)
def test_what_is_wrong_with_columns_is_one_line(tmp_path, fields, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load_samples(general(tmp_path, **fields), "train")
    assert "\n" not in str(caught.value)


def test_messages_need_the_chat_format_and_a_question(tmp_path):
    rows = [{"m": [{"role": "assistant", "content": "Hello"}]}]
    with pytest.raises(ConfigError, match="so there is no prompt"):
        load_samples(
            general(tmp_path, rows, columns={"messages": "m", "answer": None}, format={"kind": "chat"}), "train"
        )
    rows = [{"m": [{"role": "user", "content": "Hi"}]}]
    with pytest.raises(ConfigError, match=r"task\.format\.kind: messages need a chat template"):
        load_samples(general(tmp_path, rows, columns={"messages": "m", "answer": None}), "train")
