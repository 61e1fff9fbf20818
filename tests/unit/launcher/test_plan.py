"""Plans of the shipped jobs, as data."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.config.sizing.slots import version_bytes
from areal_lora.errors import ConfigError
from areal_lora.families.registry import known_config
from areal_lora.families.shape import saved_bytes
from areal_lora.families.sites import adapter_size
from areal_lora.launcher.dry_run import ports, rank_coordinates
from areal_lora.launcher.plan import JobPlan, make_plan
from tests.support.paths import EXAMPLES

MOE = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"]
EMBEDDED = [*MOE, EXAMPLES / "embedded.yaml"]
DENSE = [EXAMPLES / "gsm8k_grpo_megatron_lora_dense.yaml"]


def config_of(paths: list[Path], *overrides: str) -> Config:
    return load_config(paths, ["run.root=/r", *overrides])


def plan_of(paths: list[Path], *overrides: str) -> JobPlan:
    config = config_of(paths, *overrides)
    folder = Path(config.model.path)
    hf = json.loads((folder / "config.json").read_text()) if folder.is_dir() else known_config(config.model.path)
    return make_plan(config, Facts(hf_config=hf))


def test_embedded_processes() -> None:
    plan = plan_of(EMBEDDED)
    common = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
    }

    def trainer(rank: int) -> dict[str, str]:
        return common | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}

    run = ("--run-folder", "/r/embedded")
    assert [(p.name, p.argv, p.env) for p in plan.processes] == [
        ("server-0", (sys.executable, "-m", "areal_lora.engine.vllm_ext.server.main", *run, "--index", "0"), common),
        ("controller-0", (sys.executable, "-m", "areal_lora.rollout.main", *run), common),
        ("trainer-0", (sys.executable, "-m", "areal_lora.trainer.main", *run), trainer(0)),
        ("trainer-1", (sys.executable, "-m", "areal_lora.trainer.main", *run), trainer(1)),
    ]
    assert {p.node for p in plan.processes} == {0}


def test_each_tracker_is_a_process_of_the_launchers_interpreter_beside_the_controller() -> None:
    words = ["run.trackers=[mlflow,tensorboard,wandb]", "cluster.slurm.wrapper.controller=[apptainer]"]
    plan = plan_of(MOE, *words, "cluster.controller_python=python3")
    own = (sys.executable, "-m", "areal_lora.obs.tracking.main", "--run-folder", str(plan.run_folder), "--index")
    found = plan.role("tracker")
    assert [p.argv[len(own) :] for p in found] == [("0", "--tracker", "mlflow"), ("1", "--tracker", "wandb")]
    assert {(p.argv[:3], p.node, p.devices) for p in found} == {(own[:3], plan.role("controller")[0].node, ())}
    assert plan.role("page") == ()


def test_the_page_is_a_process_beside_the_controller() -> None:
    plan = plan_of(MOE, "run.page=true", "cluster.slurm.wrapper.controller=[apptainer]")
    [page] = plan.role("page")
    assert page.argv == (*(sys.executable, "-m", "areal_lora.obs.report.live"), *page.argv[3:])
    assert page.argv[3:] == ("--run-folder", str(plan.run_folder))
    assert (page.node, page.devices) == (plan.role("controller")[0].node, ())
    assert ("page-0", "page", "127.0.0.1", "chosen by the system") in ports(config_of(EMBEDDED, "run.page=true"))
    assert ports(config_of(EMBEDDED)) == [
        (process, plane, "127.0.0.1", "chosen by the system")
        for process, plane in (
            ("trainer-0", "store"),
            ("controller-0", "control"),
            ("server-0", "data"),
            ("server-0", "admin"),
        )
    ]


def test_nothing_secret_in_arguments_or_environment() -> None:
    for process in plan_of(MOE).processes:
        assert "secret" not in " ".join([*process.argv, *process.env, *process.env.values()]).lower()


def test_cluster_placement() -> None:
    plan = plan_of(MOE)
    assert [(p.node, p.devices) for p in plan.role("trainer")] == [(r // 8, (r % 8,)) for r in range(16)]
    assert [(p.node, p.devices) for p in plan.role("server")] == [(2, (0, 1)), (2, (2, 3)), (2, (4, 5)), (2, (6, 7))]
    assert [p.env["AREAL_LORA_DEVICES"] for p in plan.role("server")] == ["0,1", "2,3", "4,5", "6,7"]
    assert {p.env["AREAL_LORA_DEVICES"] for p in plan.role("trainer")} == {"0,1,2,3,4,5,6,7"}
    assert [p.env["LOCAL_RANK"] for p in plan.role("trainer")] == [str(r % 8) for r in range(16)]
    assert all("MASTER_ADDR" not in p.env and "GLOO_SOCKET_IFNAME" not in p.env for p in plan.processes)


def test_one_gpu_for_both_roles() -> None:
    plan = plan_of([EXAMPLES / "one_gpu.yaml"])
    assert [(p.name, p.devices) for p in plan.processes if p.devices] == [("server-0", (0,)), ("trainer-0", (0,))]
    assert {p.env["AREAL_LORA_DEVICES"] for p in plan.processes if p.devices} == {"0"}


@pytest.mark.parametrize("paths", [MOE, DENSE], ids=["moe", "dense"])
def test_no_device_is_given_twice(paths: list[Path]) -> None:
    plan = plan_of(paths)
    taken = [(p.node, device) for p in plan.processes for device in p.devices]
    assert len(taken) == len(set(taken))


def test_server_does_not_straddle_nodes() -> None:
    # 3 trainers leave 5 devices on node 0: one server of 4 fits, the next begins on node 1.
    overrides = ["trainer.world_size=3", "trainer.tp=1", "trainer.ep=1", "rollout.tp=4", "rollout.servers=3"]
    plan = plan_of(MOE, *overrides, "cluster.nodes=2")
    assert [(p.node, p.devices) for p in plan.role("server")] == [
        (0, (3, 4, 5, 6)),
        (1, (0, 1, 2, 3)),
        (1, (4, 5, 6, 7)),
    ]
    with pytest.raises(ConfigError, match="no room"):
        plan_of(MOE, *overrides, "cluster.nodes=1")


def test_roles_have_their_own_interpreter() -> None:
    plan = plan_of(EMBEDDED, "trainer.python=/t/python", "rollout.python=/r/python")
    assert [p.argv[0] for p in plan.processes] == ["/r/python", sys.executable, "/t/python", "/t/python"]


def test_rank_coordinates_cover_every_layout_once() -> None:
    config = load_config(
        MOE, ["trainer.world_size=16", "trainer.tp=2", "trainer.pp=2", "trainer.ep=4", "trainer.etp=2"]
    )
    coordinates = list(rank_coordinates(config))
    assert [c["rank"] for c in coordinates] == list(range(16))
    assert len({(c["pp"], c["dp"], c["tp"]) for c in coordinates}) == 16
    assert sorted({(c["pp"], c["ep"], c["etp"]) for c in coordinates}) == [
        (p, e, t) for p in range(2) for e in range(4) for t in range(2)
    ]
    # tp neighbours are consecutive ranks; pipeline stages are halves of the world.
    assert [c["tp"] for c in coordinates[:4]] == [0, 1, 0, 1]
    assert [c["pp"] for c in coordinates] == [0] * 8 + [1] * 8


def test_sizes_of_both_jobs() -> None:
    big, small = (plan_of(paths).shape for paths in (MOE, EMBEDDED))
    (of_big, of_small) = (config_of(paths) for paths in (MOE, EMBEDDED))
    assert of_big.rollout.resident_versions == of_small.rollout.resident_versions == 4
    assert saved_bytes(big, of_big.model.dtype) == pytest.approx(61.06e9, rel=1e-3)
    (adapter,) = of_big.adapters
    size = adapter_size(big, adapter.spec(""))
    assert (size.names, size.tensors) == (37_248, 31_008)
    assert version_bytes(of_big, big, adapter) == 2 * size.parameters
    (tiny,) = of_small.adapters
    size = adapter_size(small, tiny.spec(""))
    assert (size.names, size.tensors) == (4 * (8 + 8 * 6), 4 * (6 + 8 * 5))
    assert version_bytes(of_small, small, tiny) == 4 * size.parameters, "fp32 on the wire in the embedded run"
