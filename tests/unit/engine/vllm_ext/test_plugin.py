"""What the plugin does in a process that vLLM starts."""

from __future__ import annotations

import os

import pytest

from areal_lora.engine.vllm_ext import plugin


@pytest.mark.parametrize("of_another", [False, True])
def test_an_engine_that_is_spawned_has_the_methods_that_the_server_calls(
    of_another: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It inherits nothing that the server has set. vLLM spawns under WSL, and where CUDA is initialized."""

    class Core:
        pass

    monkeypatch.setattr("areal_lora.engine.vllm_ext.compat.engine.EngineCore", Core)
    monkeypatch.setattr(plugin, "die_with_parent", lambda signal: None)
    monkeypatch.setenv(plugin.SERVER_PID, str(os.getpid() + of_another))
    plugin.register()
    names = {name for name in vars(Core) if not name.startswith("__")}
    assert names == ({"load_now", "follow_version"} if of_another else set())
