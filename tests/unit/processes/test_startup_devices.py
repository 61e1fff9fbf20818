"""The devices of a process are positions in the list that Slurm or the user gave."""

from __future__ import annotations

import pytest

from areal_lora.errors import ConfigError
from areal_lora.processes.startup import DEVICES_VARIABLE, take_devices


def taken(chosen: str, device: str = "cuda", **inherited: str) -> dict[str, str]:
    environment = {DEVICES_VARIABLE: chosen, **inherited}
    take_devices(device, environment)
    return environment


@pytest.mark.parametrize(
    ("inherited", "chosen", "visible"),
    [
        ("4,5,6,7", "0,1", "4,5"),
        ("4,5,6,7", "2,3", "6,7"),
        ("GPU-a1, GPU-b2,GPU-c3", "1", "GPU-b2"),
        ("MIG-GPU-x/1/0,MIG-GPU-x/2/0", "1", "MIG-GPU-x/2/0"),
    ],
)
def test_numbers_of_the_plan_are_positions_in_what_was_given(inherited: str, chosen: str, visible: str) -> None:
    assert taken(chosen, CUDA_VISIBLE_DEVICES=inherited) == {"CUDA_VISIBLE_DEVICES": visible}


def test_without_a_list_the_numbers_are_those_of_the_machine() -> None:
    assert taken("2,3") == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert taken("1", "npu", ASCEND_RT_VISIBLE_DEVICES="4,5") == {"ASCEND_RT_VISIBLE_DEVICES": "5"}


def test_children_that_look_again_change_nothing() -> None:
    environment = taken("1", CUDA_VISIBLE_DEVICES="4,5")
    take_devices("cuda", environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "5"}


def test_nothing_changes_on_cpus_and_without_a_plan() -> None:
    assert taken("0", "cpu", CUDA_VISIBLE_DEVICES="4")["CUDA_VISIBLE_DEVICES"] == "4"
    environment = {"CUDA_VISIBLE_DEVICES": "4,5"}
    take_devices("cuda", environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "4,5"}


@pytest.mark.parametrize("inherited", ["4,5", ""])
def test_too_few_devices_are_an_error_with_the_numbers(inherited: str) -> None:
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES: the plan uses device number 2 .* gives [02]"):
        taken("1,2", CUDA_VISIBLE_DEVICES=inherited)
