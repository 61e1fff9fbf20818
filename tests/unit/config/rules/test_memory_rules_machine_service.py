"""Rules of a run that takes adapters over HTTP, and what it adds to the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal_lora.config.facts import gather_facts
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.config.rules.guardrails import check
from areal_lora.launch import main
from areal_lora.launcher.dry_run import file_names, ports
from areal_lora.launcher.plan import SERVICE, make_plan
from tests.support.paths import EXAMPLES

BASE = EXAMPLES / "service.yaml"


def serving(*overrides: str, **api: Any) -> Config:
    return load_config([{"service": {"api": api}}, BASE], overrides)


def findings(config: Config) -> list[str]:
    return [finding.path for finding in check(config, gather_facts(config, runs_here=False))]


def test_the_shipped_base_serves_with_a_process_and_without_one() -> None:
    config = serving()
    assert findings(config) == []
    plan = make_plan(config, gather_facts(config, runs_here=False))
    assert [spec.role for spec in plan.processes] == ["server", "controller", SERVICE, "trainer"]
    assert [host for process, _, host, _ in ports(config) if process == "service-0"] == ["127.0.0.1"]
    assert plan.run_folder.data_key.name in file_names(config, plan.run_folder), "servers ask for a key"
    alone = config.model_copy(update={"service": config.service.model_copy(update={"api": None})})  # type: ignore[union-attr]
    assert SERVICE not in {spec.role for spec in make_plan(alone, gather_facts(alone, runs_here=False)).processes}


@pytest.mark.parametrize(
    ("overrides", "api", "path"),
    [
        ((), {"data": "/nowhere"}, "service.api.data"),
        ((), {"code": ["nothing"]}, "service.api.code.0"),
        ((), {"code": ["no_such_module:name"]}, "service.api.code.0"),
        ((), {"code": ["mine.py:reward"]}, "service.api.code.0"),
        (("cluster.kind=slurm",), {}, "cluster.kind"),
        (("rollout.max_adapters=null",), {}, "rollout.max_adapters"),
    ],
)
def test_what_a_service_refuses(overrides: tuple[str, ...], api: dict[str, Any], path: str) -> None:
    assert path in findings(serving(*overrides, **api))


def test_what_the_operator_offers_exists(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(completion, answer): ...\n")
    assert findings(serving(data=str(tmp_path), code=[f"{tmp_path}/mine.py:reward", "json:loads", "code"])) == []


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Config] = []
    monkeypatch.setattr("areal_lora.cli.train.start", lambda config, fresh: started.append(config) or 0)
    command = ["--config", str(EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml")]
    assert (main(command), main([*command, "--serve"])) == (0, 0)
    assert [config.service is not None for config in started] == [False, True]
