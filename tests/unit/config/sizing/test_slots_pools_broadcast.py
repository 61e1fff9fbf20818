"""Which library carries versions, and who shares a device."""

from __future__ import annotations

import pytest

from areal_lora.config.load import load_config
from areal_lora.config.sizing.slots import broadcast_backend, seats_of, shared_devices
from tests.support.paths import EXAMPLES

MOE, ONE_GPU = EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "one_gpu.yaml"
EMBEDDED = EXAMPLES / "embedded.yaml"


@pytest.mark.parametrize(
    ("files", "overrides", "expected"),
    [
        ([MOE], [], "nccl"),
        ([MOE], ["cluster.device=npu"], "hccl"),
        ([MOE], ["weight_sync.backend=gloo"], "gloo"),
        ([MOE, EMBEDDED], [], "gloo"),
        ([ONE_GPU], [], "gloo"),
        ([ONE_GPU], ["cluster.devices_per_node=2", "cluster.share_devices=false"], "nccl"),
        ([ONE_GPU], ["weight_sync.backend=nccl"], "nccl"),  # a rule refuses it
    ],
)
def test_the_library_follows_from_the_devices(files: list[object], overrides: list[str], expected: str) -> None:
    assert broadcast_backend(load_config(files, overrides)) == expected  # type: ignore[arg-type]


def test_servers_on_shared_devices_count_from_the_first() -> None:
    eight = ["trainer.world_size=4", "cluster.devices_per_node=4", "rollout.tp=2", "rollout.servers=2"]
    config = load_config([ONE_GPU], eight)
    seats = seats_of(config)
    assert [s.devices for s in seats.trainer] == [(0,), (1,), (2,), (3,)]
    assert [s.devices for s in seats.servers] == [(0, 1), (2, 3)]
    assert shared_devices(config) == {(0, i) for i in range(4)}
    assert shared_devices(load_config([MOE])) == set()
