"""Which accelerators a process uses: a choice among those that Slurm or the user's environment gave.

The plan numbers the devices of a node from 0. What is given may be 4,5,6,7 or UUIDs, so a number of the plan is a
position in the inherited list.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from areal_lora.errors import ConfigError

DEVICES_VARIABLE = "AREAL_LORA_DEVICES"
"""Numbers of the process's devices on its node, set by the launcher."""
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The variable that a device's runtime reads when it is initialised."""


def take_devices(device: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Make only the devices of the plan visible to this process and its children. Call before the device is used.

    Without a choice of the plan, or on CPUs, nothing changes. Raises ConfigError if there are too few devices.
    """
    chosen = environment.get(DEVICES_VARIABLE)
    if chosen is None or device not in VISIBLE:
        return
    variable, numbers = VISIBLE[device], [int(number) for number in chosen.split(",")]
    inherited = environment.get(variable)
    if inherited is not None:
        given = [name.strip() for name in inherited.split(",") if name.strip()]
        if max(numbers) >= len(given):
            raise ConfigError(
                variable,
                f"the plan uses device number {max(numbers)} (counted from 0) of this node, and {inherited!r} "
                f"gives {len(given)}",
                "give as many devices as cluster.devices_per_node, or lower that",
            )
        chosen = ",".join(given[number] for number in numbers)
    environment[variable] = chosen
    del environment[DEVICES_VARIABLE]
