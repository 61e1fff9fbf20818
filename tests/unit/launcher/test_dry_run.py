"""What ``--dry-run`` says of several adapters."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.families.registry import known_config
from areal_lora.launcher.dry_run import print_plan
from areal_lora.launcher.plan import make_plan
from tests.support.paths import EXAMPLES

FACTS = Facts(hf_config=known_config("Qwen/Qwen3-30B-A3B"))


def printed(config: Config, facts: Facts = FACTS) -> list[str]:
    out = io.StringIO()
    print_plan(config, make_plan(config, facts), Console(file=out, width=200))
    return out.getvalue().splitlines()


def several() -> Config:
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"], ["run.steps=100"])
    [only] = config.adapters
    light = {"target_modules": ["linear_qkv"], "steps": 10, "weight": 3.0}
    adapters = [only, only.model_copy(update={"name": "light", **light})]
    return config.model_copy(update={"adapters": adapters})


def test_each_of_several_adapters_has_a_line_and_the_steps_are_their_sum() -> None:
    lines = printed(several())
    assert "110 steps of 2 adapters on Slurm" in lines[0]
    heavy, light = (line for line in lines if line.startswith("Adapter "))
    assert heavy.startswith("Adapter gsm8k: 100 steps, weight 1, 25% of the trained tokens while all train, ")
    # q, k, v of 48 layers at rank 32: lora_A is sent once; 2048 inputs, (32 + 2 * 4) * 128 outputs.
    nbytes = 48 * 32 * (2048 + 40 * 128) * 2
    assert light == (
        f"Adapter light: 10 steps, weight 3, 75% of the trained tokens while all train, "
        f"{nbytes / 1e6:.2f} MB (bfloat16) a version"
    )


def test_one_adapter_has_no_such_line() -> None:
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"], ["run.steps=100"])
    lines = printed(config)
    assert ": 100 steps on Slurm" in lines[0]
    assert not [line for line in lines if line.startswith("Adapter ")]
    [groups] = [line for line in lines if line.startswith("Broadcast groups: ")]
    assert groups.startswith("Broadcast groups: 1 of 9 members, "), "8 ranks of one node; 4 servers of 2 workers"
    # 4 invitations of 0.4 ms; 8 workers sign in at the source, 2.1 ms each, and connect 8 times, 0.23 ms.
    assert "formed at once, in about 0.02 s, at most 30 s" in groups


@pytest.mark.parametrize(
    ("overrides", "end"),
    [
        # In bfloat16, at rank 32: 48 layers of 128 experts (2048 inputs, 768 between), and attention. tp 2 divides what
        # is between, expert parallel the experts.
        ([], "5 of 2.91 GB on each worker; 1.70 GB with rollout.expert_parallel=true"),
        (["rollout.expert_parallel=true"], "5 of 1.70 GB on each worker"),
        (["rollout.tp=1"], "5 of 3.38 GB on each worker"),
    ],
)
def test_slots_and_what_would_make_them_smaller(overrides: list[str], end: str) -> None:
    lines = printed(load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"], overrides))
    [found] = [line for line in lines if line.startswith("Slots of a server: ")]
    assert found == f"Slots of a server: {end}"


def test_merged_versions_have_the_time_of_their_merging() -> None:
    """59.8 GB; each of 8 ranks moves its share to the device and back, at 10 GB/s. A link takes 12.5 GB/s."""
    file = EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"
    [plain], [merged] = (
        [line for line in printed(load_config([file], keys)) if line.startswith("Publish of ")]
        for keys in ([], ["rollout.adapter_mode=merged"])
    )
    whole = "59.79 GB (bfloat16) a version, merged by 8 trainer ranks in about 1.49 s, at least 4.78 s at 100 Gbit/s; "
    assert merged.startswith(f"Publish of gsm8k: {whole}")
    assert "(bfloat16) a version, at least" in plain


@pytest.mark.parametrize(
    ("tp", "nodes", "groups", "end", "seconds"),
    [
        # 32 hosts, 64 expert-parallel ranks on 8 nodes: 64 x 0.4 ms + (256 + 8) x 2.1 ms + 8 x 256 x 0.23 ms.
        (4, 64, "8 of 257 members, a trainer rank that sends and all workers", "leave", 1.05),
        # 64 hosts: groups of 32 servers, of 31 below the first relay, and of 1 below the second.
        (
            8,
            96,
            "24 of at most 257 members, for each of 8 trainer ranks that send its group and 2 below",
            "time",
            1.59,  # 512 workers and 2 relays sign in
        ),
    ],
)
def test_groups_of_64_servers_have_relays_where_hosts_are_many(
    tp: int, nodes: int, groups: str, end: str, seconds: float
) -> None:
    sizes = ["trainer.world_size=256", "trainer.tp=4", "trainer.ep=64", f"cluster.nodes={nodes}"]
    files = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"]
    config = load_config(files, [*sizes, "rollout.servers=64", f"rollout.tp={tp}"])
    lines = printed(config, Facts(hf_config=known_config("Qwen/Qwen3-235B-A22B")))
    [line] = [line for line in lines if line.startswith("Broadcast groups: ")]
    assert line.startswith(f"Broadcast groups: {groups}"), line
    assert f"in about {seconds:.2f} s, at most 30 s" in line
    assert line.endswith(end)
