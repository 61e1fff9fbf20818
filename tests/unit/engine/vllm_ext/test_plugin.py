"""What the plugin does in a process that vLLM starts."""

from __future__ import annotations

import os

import pytest

from areal_lora.engine.vllm_ext import plugin


@pytest.mark.parametrize("server", [os.getpid(), os.getpid() + 1])
def test_an_engine_that_is_spawned_has_the_methods_that_the_server_calls(
    server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It inherits nothing that the server has set. vLLM spawns under WSL, and where CUDA is initialized."""

    class Core:
        pass

    monkeypatch.setattr("areal_lora.engine.vllm_ext.compat.engine.EngineCore", Core)
    monkeypatch.setattr(plugin, "die_with_parent", lambda signal: None)
    monkeypatch.setenv(plugin.SERVER_PID, str(server))
    plugin.register()
    names = {name for name in vars(Core) if not name.startswith("__")}
    assert names == ({"kv_cache_share", "follow_version"} if server != os.getpid() else set())
