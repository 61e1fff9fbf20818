"""Which models the server of `serve`, `chat` and `eval` gets, with a program that answers alone in place of vLLM."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from areal_lora.cli.app import main
from areal_lora.cli.serve import served
from areal_lora.errors import ExitCode
from tests.support.checkpoint.trained_run import make_run

PROGRAM = """#!{python}
import http.server, json, os, sys
words = sys.argv[sys.argv.index("--lora") + 1:]
exported = [os.path.isfile(word.partition("=")[2] + "/adapter_config.json") for word in words]
print(json.dumps([[word.partition("=")[0] for word in words], exported]), flush=True)
class Answers(http.server.BaseHTTPRequestHandler):
    requests = 0
    def do_GET(self):
        Answers.requests += 1
        if Answers.requests == 1:  # another process may have taken the port for a moment
            self.wfile.write(b"no line of HTTP" + bytes(2))
            return
        self.send_response(200)
        self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answers).serve_forever()
"""


@pytest.mark.parametrize(
    ("versions", "models", "adapters"),
    [
        (["newest"], ("gsm8k@v3",), ["gsm8k@v3"]),
        (["base"], ("base",), []),
        (["best", "base"], ("gsm8k@v1", "base"), ["gsm8k@v1"]),
        (["base", "3", "newest"], ("base", "gsm8k@v3"), ["gsm8k@v3"]),
    ],
)
def test_the_base_is_a_model_without_an_adapter(
    tmp_path: Path, versions: Sequence[str], models: tuple[str, ...], adapters: list[str]
) -> None:
    folder, config = make_run(tmp_path)
    program = tmp_path / "program"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"python": str(program)})})
    with served(folder, config, config.adapters[0], versions, 0) as server:
        assert server.models == models
        started = json.loads(server.log.read_text().splitlines()[0])
    assert started == [adapters, [True] * len(adapters)]


@pytest.mark.parametrize("words", [["export"], ["merge"]])
def test_the_base_is_not_written(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = make_run(tmp_path)
    assert main([*words, str(folder), str(tmp_path / "out"), "--version", "base"]) == ExitCode.WRONG_INPUT
    assert "--version base: the base has no adapter (fix: give a number, newest or best)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
