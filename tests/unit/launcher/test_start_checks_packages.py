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
