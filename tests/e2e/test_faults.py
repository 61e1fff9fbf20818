"""Every fault that reached users of comparable systems unnoticed stops a run here."""

from __future__ import annotations

import json

import pytest

from areal_lora.config.load import load_config
from areal_lora.run_folder.rendezvous import create_secret
from tests.support.engine.vllm_ext.serving import start_server
from tests.support.forks.starter import starter_of
from tests.support.launcher.command import ROLES
from tests.support.paths import EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("faults")
    config = load_config(
        [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"],
        [f"run.root={root}", "run.name=faults", "trainer.world_size=1", "trainer.ep=1", "weight_sync.timeout_s=60"],
    )
    folder = config.run_folder.path
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.model_dump_json())
    create_secret(config.run_folder)
    server = start_server(folder, 0, folder / "server.log")
    try:
        said = starter_of(ROLES["trainer.python"]).output("tests.support.e2e.faults", [str(folder)], 400.0)
    finally:
        server.terminate()
        server.wait(150)
    return json.loads(said.strip().splitlines()[-1])


@pytest.mark.parametrize("name", ["version 0", "none", "aligned", "small adapter", "small step"])
def test_what_is_right_is_accepted(verdicts: dict[str, str], name: str) -> None:
    assert verdicts[name] == "accepted"


@pytest.mark.parametrize(
    ("name", "noticed_by"),
    [
        ("flip one expert's lora_B", "ParityError"),
        ("swap gate and up", "ParityError"),
        ("drop a layer", "AdapterError: gsm8k@v4: the adapter "),
        ("wrong alpha", "ManifestError: publish refused: alpha"),
        ("nan", "ManifestError: publish refused: non_finite"),
        ("shift the loss mask by one", "AlignmentError"),
        ("small step, the version before serves", "ParityError: gsm8k@v9 on server server-0"),
        ("small adapter, the base serves", "ParityError: gsm8k@v10 on server server-0"),
    ],
)
def test_each_fault_is_noticed(verdicts: dict[str, str], name: str, noticed_by: str) -> None:
    assert verdicts[name].startswith(noticed_by), verdicts[name]
