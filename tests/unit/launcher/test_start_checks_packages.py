"""A missing package of a role is found before anything starts."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from areal_lora.errors import EnvironmentError_, ExitCode
from areal_lora.launcher.start import check_packages
from tests.support.obs.fake_run import make_config


@pytest.mark.parametrize(("module", "role"), [("vllm", "rollout"), ("megatron.bridge", "trainer")])
def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, module: str, role: str) -> None:
    check_packages(make_config())
    real = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name == module else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(EnvironmentError_, match=f"has no package {module}") as caught:
        check_packages(make_config())
    assert caught.value.exit_code == ExitCode.MISSING
    config = make_config()
    section = getattr(config, role).model_copy(update={"python": "/elsewhere/bin/python"})
    check_packages(config.model_copy(update={role: section}))


def test_a_node_needs_the_packages_of_its_own_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    check_packages(make_config(), {"controller"})
    for role, module in (("trainer", "megatron.core"), ("rollout", "vllm")):
        with pytest.raises(EnvironmentError_, match=f"has no package {module}"):
            check_packages(make_config(), {role})


@pytest.mark.parametrize(("device", "engine"), [("cuda", "megatron"), ("cuda", "fsdp"), ("cpu", "megatron")])
def test_megatrons_layers_on_gpus_are_those_of_transformer_engine(device: str, engine: str) -> None:
    config = make_config()
    cluster = config.cluster.model_copy(update={"device": device})
    config = config.model_copy(
        update={"cluster": cluster, "trainer": config.trainer.model_copy(update={"engine": engine})}
    )
    if (device, engine) != ("cuda", "megatron"):
        check_packages(config)
        return
    with pytest.raises(EnvironmentError_, match="has no package transformer_engine_torch"):
        check_packages(config)
