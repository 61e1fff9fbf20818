"""``areal-lora chat`` with one or two versions: what is sent, printed and kept; a fake in place of vLLM's server."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from areal_lora.cli.app import main
from areal_lora.cli.serve import ServingEndpoint
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.errors import ExitCode
from areal_lora.launcher.supervise import Supervisor
from areal_lora.obs.report.version_answers import read_answers
from areal_lora.run_folder.paths import RunFolder
from tests.support.paths import TINY_MODEL
from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.helpers import config
from tests.support.rollout.running import Loop

BOTH = ("math@v7", "math@v3")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    loop, made = Loop(), FakeServer(models=set(BOTH), columns=False)
    made.answer = lambda prompt, _: ([1], f" {made.requests[-1]['model'][-1]} of {len(prompt)} ")
    loop.run(made.__aenter__())

    @contextlib.contextmanager
    def fake(
        folder: object, run: Config, adapter: AdapterConfig, versions: Sequence[str], port: int
    ) -> Iterator[ServingEndpoint]:
        models = tuple(dict(zip(("newest", "best"), BOTH, strict=True))[version] for version in versions)
        yield ServingEndpoint(
            url=f"{made.url}/v1", models=models, processes=Supervisor(tmp_path, 0.0), log=tmp_path / "log"
        )

    monkeypatch.setattr("areal_lora.cli.serve.served", fake)
    yield made
    loop.run(made.__aexit__())
    loop.close()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path / "a run")
    found.path.mkdir()
    found.config.write_text(config(str(TINY_MODEL)).model_dump_json())
    return found


def test_one_prompt_of_two_versions(server: FakeServer, folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(folder), "--against", "best", "--prompt", "2 + 2?"]) == ExitCode.DONE
    first, second = server.requests
    assert first["prompt"] == second["prompt"]
    length = len(first["prompt"])
    assert capsys.readouterr().out == f"math@v7:\n7 of {length}\nmath@v3:\n3 of {length}\n"
    assert [path.name for path in folder.path.iterdir()] == ["config.json"], "the run folder stays as it is"
    assert main(["chat", str(folder), "--prompt", "2 + 2?", "--save"]) == ExitCode.DONE
    assert capsys.readouterr().out == f"7 of {length}\n"
    [saved] = read_answers(folder)
    assert (saved.prompt, saved.gold, saved.answers) == ("2 + 2?", "", {"math@v7": f"7 of {length}"})


def test_an_answer_does_not_steer_the_terminal(
    server: FakeServer, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = lambda prompt, _: ([1], "a\x1b]52;c;Yg==\x07\n\tb")
    assert main(["chat", str(folder), "--prompt", "2 + 2?", "--save"]) == ExitCode.DONE
    assert capsys.readouterr().out == "a\\x1b]52;c;Yg==\\x07\n\tb\n"
    assert [*read_answers(folder)[0].answers.values()] == ["a\x1b]52;c;Yg==\x07\n\tb"], "the record is exact"


def test_a_proxy_of_the_environment_is_not_between(
    server: FakeServer, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert main(["chat", str(folder), "--prompt", "2 + 2?"]) == ExitCode.DONE


def test_lines_of_a_file_are_prompts(
    server: FakeServer, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("1 + 1?\n\n/new\n2 + 2 + 2?\n"))
    assert main(["chat", str(folder), "--version", "best", "--against", "newest", "--save"]) == ExitCode.DONE
    newest, before = read_answers(folder)
    assert [before.prompt, newest.prompt] == ["1 + 1?", "2 + 2 + 2?"]
    assert [*newest.answers] == [*before.answers] == ["math@v3", "math@v7"]
    assert newest.answers != before.answers
    assert capsys.readouterr().out.count("math@v3:\n") == 2


def test_held_out_problems_are_those_of_the_first_set_with_their_answers(
    server: FakeServer, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    made = json.loads(folder.config.read_text())
    made["adapters"][0]["evals"] = [{"name": "short", "n": 3, "max_new_tokens": 5}, {"name": "other", "n": 2}]
    folder.config.write_text(json.dumps(made))
    assert main(["chat", str(folder), "--against", "best", "--held-out", "2", "--save"]) == ExitCode.DONE
    assert [(body["model"], body["max_tokens"]) for body in server.requests] == [(name, 5) for name in BOTH] * 2
    assert all(body["stop_token_ids"] == [1] for body in server.requests), "the end of a turn in the model's template"
    second, first = read_answers(folder)
    assert first.prompt != second.prompt
    assert all(saved.gold and set(saved.answers) == set(BOTH) for saved in (first, second))
    assert capsys.readouterr().out.startswith(f"{first.prompt}\nmath@v7:\n")
    server.requests.clear()
    assert main(["chat", str(folder), "--held-out", "10"]) == ExitCode.DONE
    assert len(server.requests) == 3, "all that there are, and no prompt is read"


def test_a_damaged_file_is_named(folder: RunFolder) -> None:
    folder.answers.write_text('{"at": "x", "prompt": "p", "answers": {}}\n{"at": 1}\n')
    assert main(["report", str(folder)]) == ExitCode.WRONG_INPUT
