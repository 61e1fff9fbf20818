"""A configuration from options: it passes the checks of a start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_lora.cli import app
from areal_lora.config.load import load_config
from areal_lora.config.sections.task import DatasetTask, FunctionReward
from areal_lora.tasks.datasets import load_samples
from tests.support.paths import TINY_MODEL

ROWS = [{"problem": f"{n} + 1?", "solution": f"#### {n + 1}"} for n in range(20)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "my data" / 'rows "of" mine.jsonl'
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def options(data: Path, reward: str) -> list[str]:
    words = {"model": TINY_MODEL, "data": data, "prompt": "problem", "answer": "solution", "reward": reward}
    return [part for name, value in words.items() for part in (f"--{name}", str(value))]


@pytest.mark.parametrize("chat", [False, True])
def test_what_it_writes_passes_the_dry_run(
    data: Path, tmp_path: Path, chat: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    extra = ["--chat"] if chat else []
    assert app.main(["init", "my task.yaml", *options(data, "numeric_match"), "--device", "cpu", *extra]) == 0
    config = load_config([tmp_path / "my task.yaml"])
    task = config.adapters[0].task
    assert isinstance(task, DatasetTask)
    assert (config.run.name, task.train, task.format.is_chat) == ("my-task", str(data), chat)
    capsys.readouterr()
    assert app.main(["plan", "--config", "my task.yaml", "rollout.max_model_len=256", "adapters.0.rank=4"]) == 0
    out, err = capsys.readouterr()
    assert "my-task" in out
    assert "error" not in err
    assert app.main(["plan", "--config", "my task.yaml"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("column", ["problem", "extra.problem"])
def test_a_column_of_chat_messages_is_named_as_one(data: Path, tmp_path: Path, column: str) -> None:
    rows = [row | {"problem": [{"role": "user", "content": row["problem"]}]} for row in ROWS]
    data.write_text("".join(json.dumps(row | {"extra": row}) + "\n" for row in rows))
    file, words = tmp_path / "x.yaml", options(data, "numeric_match")
    words[words.index("--prompt") + 1] = column
    assert app.main(["init", str(file), *words, "--device", "cpu"]) == 0
    task = load_config([file]).adapters[0].task
    assert isinstance(task, DatasetTask)
    assert (task.columns.messages, task.format.is_chat) == (column, True)
    assert "prompt: " not in file.read_text(), "it would be a column without a use"
    assert load_samples(task, "train")[0].messages is not None


@pytest.mark.parametrize("rows", [b"", b'{"other": 1}\n'], ids=["empty", "another column"])
def test_rows_that_do_not_show_what_the_column_holds_are_a_matter_of_the_start(
    data: Path, tmp_path: Path, rows: bytes
) -> None:
    data.write_bytes(rows)
    file = tmp_path / "x.yaml"
    assert app.main(["init", str(file), *options(data, "numeric_match"), "--device", "cpu"]) == 0
    task = load_config([file]).adapters[0].task
    assert isinstance(task, DatasetTask)
    assert (task.columns.prompt, task.columns.messages) == ("problem", None)


def test_a_configuration_for_gpus_passes_it_too(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "gpu.yaml"
    assert app.main(["init", str(file), *options(data, "numeric_match"), "--device", "cuda"]) == 0
    assert load_config([file]).cluster.device == "cuda"


def test_a_reward_of_a_package_keeps_its_name(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    assert app.main(["init", str(file), *options(data, "mypkg.rewards:score"), "--device", "cpu"]) == 0
    assert 'path: "mypkg.rewards:score"' in file.read_text()


def test_a_reward_of_the_user_and_data_without_answers(data: Path, tmp_path: Path) -> None:
    reward = tmp_path / "my reward.py"
    reward.write_text("def score(completion, **_):\n    return 1.0\n")
    file = tmp_path / "x.yaml"
    words = [*options(data, f"{reward}:score"), "--answer", "-"]
    assert app.main(["init", str(file), *words, "--device", "cpu"]) == 0
    adapter = load_config([file]).adapters[0]
    assert isinstance(adapter.reward, FunctionReward)
    assert adapter.reward.path == f"{reward}:score"
    assert isinstance(adapter.task, DatasetTask)
    assert adapter.task.columns.answer is None
    assert app.main(["plan", "--config", str(file)]) == 0


def test_what_is_missing_is_named_and_nothing_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.yaml"
    assert app.main(["init", str(file), "--model", "m"]) == 64
    assert "--data: it is missing" in capsys.readouterr().err
    assert not file.exists()
    file.write_text("mine")
    assert app.main(["init", str(file)]) == 64
    assert file.read_text() == "mine"


def test_a_model_with_a_size_for_each_layer_is_named(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((TINY_MODEL / "config.json").read_text())
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": [64] * 4}))
    words = ["--model", str(model), *options(data, "numeric_match")[2:], "--device", "cpu"]
    assert app.main(["init", str(tmp_path / "x.yaml"), *words]) == 64
    assert f"{model}: its config.json cannot be used: TypeError" in capsys.readouterr().err
