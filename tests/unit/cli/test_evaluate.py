"""``areal-lora eval``: the sets of a run against one version, with a fake in place of vLLM's server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from areal_lora.cli.app import main
from areal_lora.cli.serve import ServingEndpoint
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.errors import ExitCode
from areal_lora.launcher.supervise import Supervisor
from tests.support.paths import TINY_MODEL
from tests.support.rollout.fake_server import FakeServer, Fault
from tests.support.rollout.helpers import config
from tests.support.rollout.running import Loop

SETS = [{"name": "greedy", "n": 8}, {"name": "sampled", "n": 4, "n_samples": 2, "temperature": 0.7}]


def bare(body: dict[str, list[dict[str, object]]]) -> None:
    """As stock vLLM answers: no version per token."""
    for choice in body["choices"]:
        del choice["versions"]


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    loop, server = Loop(), FakeServer(models={"math@v3", "base@v0"}, fault=lambda _: Fault(edit=bare), columns=False)
    loop.run(server.__aenter__())

    @contextlib.contextmanager
    def fake(
        folder: object, made: Config, adapter: AdapterConfig, versions: Sequence[str], port: int
    ) -> Iterator[ServingEndpoint]:
        assert adapter.name == "math"
        [version] = versions
        model = "base" if version == "base" else "math@v3"
        yield ServingEndpoint(
            url=f"{server.url}/v1", models=(model,), processes=Supervisor(tmp_path, 0.0), log=tmp_path / "log"
        )

    monkeypatch.setattr("areal_lora.cli.evaluate.served", fake)
    made = config(str(TINY_MODEL)).model_dump(mode="json")
    made["adapters"][0]["evals"] = SETS
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(made))
    yield folder
    for request in server.requests:
        assert request["top_p"] == (0.95 if request["temperature"] == 0.6 else 1.0)
        assert not request.get("return_kept")
    loop.run(server.__aexit__())
    loop.close()


def test_all_sets_or_one_of_them(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run_folder), "--version", "best"]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["math@v3  greedy", "math@v3  sampled"]
    assert "pass@2 0.000" in lines[1]
    assert main(["eval", str(run_folder), "--set", "sampled", "--json"]) == ExitCode.DONE
    (record,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (record["kind"], record["name"], record["version"], record["n"]) == ("eval", "sampled", 3, 4)
    assert record["n_samples"] == 2
    assert [path.name for path in run_folder.iterdir()] == ["config.json"], "the run folder stays as it is"


def test_the_base_is_evaluated_on_the_same_sets(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run_folder), "--version", "base"]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["base  greedy", "base  sampled"]
    assert main(["eval", str(run_folder), "--version", "base", "--set", "greedy", "--json"]) == ExitCode.DONE
    record = json.loads(capsys.readouterr().out)
    assert (record["adapter"], record["version"], record["n"]) == ("base", 0, 8)


def test_sets_that_the_run_did_not_have(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the sampling of a model card: answers have no kept ids, so that top_p needs no top_k."""
    new = "adapters.math.evals=[{name: new, n: 3, n_samples: 2, temperature: 0.6, top_p: 0.95}]"
    assert main(["eval", str(run_folder), new, "--json"]) == ExitCode.DONE
    (record,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (record["name"], record["n"], record["n_samples"], record["temperature"]) == ("new", 3, 2, 0.6)
    assert json.loads((run_folder / "config.json").read_text())["adapters"][0]["evals"] == SETS
    assert main(["eval", str(run_folder), "adapters.math.rank=2"]) == ExitCode.WRONG_INPUT
    assert "adapters.math.rank" in capsys.readouterr().err


def test_one_of_several_adapters_is_named(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = json.loads((run_folder / "config.json").read_text())
    own = made["adapters"][0] | {"name": "other", "evals": made["adapters"][0]["evals"][:1]}
    (run_folder / "config.json").write_text(json.dumps(made | {"adapters": [own, *made["adapters"]]}))
    assert main(["eval", str(run_folder)]) == ExitCode.WRONG_INPUT
    assert "the run has several: other, math" in capsys.readouterr().err
    assert main(["eval", str(run_folder), "--adapter", "math", "--set", "sampled"]) == ExitCode.DONE
    assert capsys.readouterr().out.startswith("math@v3  sampled: ")


def test_a_set_that_is_not_there(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run_folder), "--set", "hard"]) == ExitCode.WRONG_INPUT
    assert "it has: greedy, sampled" in capsys.readouterr().err
