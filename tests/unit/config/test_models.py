from __future__ import annotations

import pytest

from areal_lora.config.load import load_config
from areal_lora.config.models import PEERS, leaf_keys
from tests.support.paths import EXAMPLES


@pytest.mark.parametrize(
    ("override", "waits"),
    [
        ("run.steps=4", True),
        ("rollout.max_staleness=1", False),
        ("adapters.0.max_staleness=1", False),
        ("adapters.0.sft.steps=4", False),
        ("adapters.0.workflow={kind: agent, path: 'agent.py:play'}", False),
        ("service.target_modules=[all-linear]", False),
    ],
)
def test_requests_wait_on_servers_only_where_none_has_a_deadline_or_comes_too_late(override: str, waits: bool) -> None:
    files = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
    assert load_config(files, [override]).waits_on_servers is waits


def test_the_names_of_other_systems_are_none_here_and_lead_to_keys() -> None:
    keys = set(leaf_keys())
    assert set(PEERS.values()) <= keys
    assert not PEERS.keys() & {key.rpartition(".")[2] for key in keys}
