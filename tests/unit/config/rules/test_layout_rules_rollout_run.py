"""Time-outs that watch over each other."""

from __future__ import annotations

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.models import WeightSyncConfig
from areal_lora.config.rules.guardrails import check
from areal_lora.errors import ConfigError
from areal_lora.run_folder.status import HEARTBEAT_TIMEOUT_S
from tests.support.paths import EXAMPLES

FILES = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]


def found(*overrides: str) -> dict[str, str]:
    findings = check(load_config(FILES, overrides), Facts(hf_config=None))
    return {f.path: f.reason for f in findings if f.path == "run.stall_s"}


def test_a_stopped_controller_or_server_is_found_within_a_minute_by_default() -> None:
    assert HEARTBEAT_TIMEOUT_S <= 60.0
    assert found() == {}


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (["run.stall_s=217"], "run.stall_s", "217.2 s"),
        (["weight_sync.timeout_s=200"], "run.stall_s", "trainer rank 0 sends no heartbeat"),
    ],
)
def test_relations(overrides: list[str], path: str, words: str) -> None:
    assert words in found(*overrides)[path]


def test_just_inside() -> None:
    assert found("run.stall_s=218") == {}


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (["run.profile=[1, 40]"], {}),
        (["run.profile=[41, 3]"], {"run.profile": "41 is after the last step, 40"}),
        (["run.profile=[41]", "adapters.0.steps=41"], {}),
    ],
)
def test_what_is_profiled_exists(overrides: list[str], refused: dict[str, str]) -> None:
    config = load_config(FILES, ["run.steps=40", *overrides])
    findings = check(config, Facts(hf_config=None))
    assert {f.path: f.reason for f in findings if f.path.startswith("run.profile")} == refused


@pytest.mark.parametrize("overrides", ["[0]", "{}", "5"])
def test_a_profile_of_step_0_or_of_no_list_is_refused(overrides: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.profile"):
        load_config(FILES, [f"run.profile={overrides}"])


@pytest.mark.parametrize("timeout_s", [1.0, 5.0, 20.0, 30.0, 300.0, 3000.0])
def test_the_budget_of_a_publish_has_room_for_what_rank_0_may_do(timeout_s: float) -> None:
    sync = WeightSyncConfig(timeout_s=timeout_s)
    # A first transfer that fails as late as it can, what is found out about it, and a second one.
    before, pings = 2 * sync.ping_s, sync.ping_s
    first = before + sync.attempt_s + sync.answer_s + pings
    assert first < sync.timeout_s
    # The last transfer ends by the deadline; then come answers, pings, ends, and the probe or another look around.
    after = sync.answer_s + sync.ping_s + sync.ping_s + sync.ping_s
    assert sync.timeout_s + 2 * sync.form_s + after <= sync.publish_s + 1e-9
    # A decision to send again is taken a ping before the deadline at the latest; looking around takes two.
    assert sync.timeout_s - sync.ping_s + 2 * sync.ping_s <= sync.publish_s
