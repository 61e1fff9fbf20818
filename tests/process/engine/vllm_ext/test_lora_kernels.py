"""vLLM's own Triton kernels, interpreted, on slots that the receiver wrote: dense layers and experts, parallel ranks.

Slots hold adapters of three expert layouts, ranks and scales over dirty ones, and tokens of all of them are mixed with
tokens of the base. Products are compared with float64, and are exact.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.sizes import NIGHTLY, sample
from tests.support.wheels import unpacked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DENSE = {"dense float32", "dense bfloat16", "dense tp 2", "dense tp 4", "dense dependent launch", "dense active"}
EXPERTS = {
    "experts active": "_fused_moe_lora_one_shot_kernel",
    "experts small batch": "_fused_moe_lora_small_batch_kernel",
    "experts sorted": "_fused_moe_lora_one_shot_kernel",
    "experts unsorted": "_fused_moe_lora_one_shot_kernel",
    "experts ep 2": "_fused_moe_lora_one_shot_kernel",
    "experts ep 4": "_fused_moe_lora_one_shot_kernel",
    "experts tp 2": "_fused_moe_lora_one_shot_kernel",
    "experts tp 4": "_fused_moe_lora_one_shot_kernel",
    "experts shared small batch": "_fused_moe_lora_small_batch_kernel",
    "experts shared sorted": "_fused_moe_lora_one_shot_kernel",
    "experts shared ep 2": "_fused_moe_lora_one_shot_kernel",
    "experts shared tp 2": "_fused_moe_lora_one_shot_kernel",
    "experts shared rank 256": "_fused_moe_lora_kernel",
    "experts shared rank 256 descriptors": "_fused_moe_lora_kernel",
    "experts rank 256": "_fused_moe_lora_kernel",
    "experts rank 256 unsorted": "_fused_moe_lora_kernel",
    "experts rank 256 descriptors": "_fused_moe_lora_kernel",
    "experts rank 256 descriptors unsorted": "_fused_moe_lora_kernel",
}
"""By the kernel that they launch."""
FAULTS = {"swapped slots", "swapped gate and up", "a cell beyond the rank", "shifted experts", "disabled"}
RELATIVE = 0.03  # of a whole layer in bfloat16; without adapters 0.3
NEWER = "0.33.0"


def kind(case: str) -> set[str]:
    shared, shards = "shared" * ("shared" in case), "shards" * (" tp " in case or " ep " in case)
    return {case.split()[0], "rank 256" * ("rank" in case), shared, shards}


CASES = [*sample(sorted(DENSE | set(EXPERTS)), 0, kind), "whole", *(f"fault: {fault}" for fault in sorted(FAULTS))]


@cache
def reports(*cases: str, files: Path | None = None) -> dict[str, dict[str, Any]]:
    """By case, from a process of its own: Triton decides at import that it is interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"KERNEL_FILES": str(files)} if files else {}
    command = [sys.executable, "-m", "tests.support.engine.vllm_ext.triton_interpreter", *cases]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    read = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [report["case"] for report in read] == list(cases)
    return {report["case"]: report for report in read}


def check(case: str, report: dict[str, Any]) -> None:
    errors, launches = report["errors"], report["launches"]
    if case.startswith("fault: "):
        assert errors["gate_up"] >= 1, "a wrong slot is seen"
    elif case == "whole":
        assert errors["apply"] < RELATIVE < errors["without adapters"]
        assert {"fused_moe_kernel", "_fused_moe_lora_one_shot_kernel"} <= set(launches)
    else:
        assert set(errors.values()) == {0.0}, errors
        assert EXPERTS.get(case, "_lora_shrink_kernel") in launches
    assert case not in DENSE or len(errors) == 6, "of two layers: qkv, o, and of the dense one gate_up, down"


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_read_the_slots(case: str) -> None:
    check(case, reports(*CASES)[case])


@pytest.mark.skipif(not NIGHTLY, reason="downloads a wheel of 700 MB: only with AREAL_LORA_NIGHTLY=1")
def test_the_kernels_of_a_newer_wheel_read_the_slots(tmp_path: Path) -> None:
    for case, report in reports(*CASES, files=(files := unpacked("vllm", NEWER, tmp_path))).items():
        assert Path(report["file"]).is_relative_to(files), "not the installed ones"
        check(case, report)
