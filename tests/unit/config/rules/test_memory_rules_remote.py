"""Rules of a run in which servers elsewhere serve, and what it adds to the plan."""

from __future__ import annotations

import pytest

from areal_lora.config.facts import gather_facts
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.config.rules.guardrails import check
from areal_lora.launcher.dry_run import ports
from areal_lora.launcher.plan import REMOTE, make_plan
from tests.support.paths import EXAMPLES


def serving(*overrides: str) -> Config:
    return load_config([{"rollout": {"remote": {}}}, EXAMPLES / "service.yaml"], overrides)


def findings(config: Config) -> list[str]:
    return [finding.path for finding in check(config, gather_facts(config, runs_here=False))]


def test_a_gateway_is_a_process_of_the_run() -> None:
    config = serving("rollout.remote.port=4711")
    assert findings(config) == []
    plan = make_plan(config, gather_facts(config, runs_here=False))
    [gateway] = plan.role(REMOTE)
    assert gateway.argv[2] == "areal_lora.engine.vllm_ext.remote.remote_gateway"
    assert [(host, port) for process, _, host, port in ports(config) if process == "remote-0"] == [
        ("127.0.0.1", "4711")
    ]


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (("rollout.remote.host=0.0.0.0",), "rollout.remote.certificate"),
        (("weight_sync.backend=nccl", "cluster.device=cuda"), "weight_sync.backend"),
    ],
)
def test_what_it_refuses(overrides: tuple[str, ...], path: str) -> None:
    assert path in findings(serving(*overrides))
    assert "rollout.remote.certificate" not in findings(serving(*overrides, "rollout.remote.certificate=run.pem"))
