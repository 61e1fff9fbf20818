"""Which processes the launcher ends for their silence, in virtual time."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.families.registry import known_config
from areal_lora.launcher import restarts, watch
from areal_lora.launcher.plan import CONTROLLER, SERVER, TRAINER, ProcessSpec, make_plan
from areal_lora.obs.console import LiveConsole
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import HEARTBEAT_TIMEOUT_S, last_beats
from tests.support.launcher.cached_mount import CACHE_S, CachedMount
from tests.support.paths import EXAMPLES

STUCK_S, END_S = 300.0, 600.0


def test_on_a_mount_that_caches_attributes_for_long_only_a_stuck_process_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, looks = RunFolder(tmp_path / "run"), list[float]()
    specs = tuple(ProcessSpec(role=r, index=0, argv=("x",), env={}) for r in (CONTROLLER, SERVER, TRAINER))
    specs += tuple(ProcessSpec(role=SERVER, index=i, argv=("x",), env={}) for i in (1, 2))
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"])
    plan = make_plan(config, Facts(hf_config=known_config("Qwen/Qwen3-30B-A3B")))
    mount = CachedMount(folder, specs, monkeypatch)

    def counted(run_folder: RunFolder) -> dict[str, int]:
        looks.append(mount.clock.now)
        return last_beats(run_folder)

    def asked_to_stop() -> bool:
        if mount.clock.now >= STUCK_S and not mount.ended:
            mount.stuck |= {"server-0", "server-2"}
        return mount.clock.now >= END_S

    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=mount.clock, sleep=mount.sleep))
    monkeypatch.setattr(watch, "last_beats", counted)
    monkeypatch.setattr(restarts, "WRITE_S", 0.0)
    view = LiveConsole(folder, {}, Console(file=io.StringIO(), width=200))
    run = watch.Watch(config, replace(plan, run_folder=folder, processes=specs), mount, view, poll_s=0.25)
    assert run.until_end(asked_to_stop) is None
    assert mount.ended.keys() == {"server-0", "server-2"}
    assert mount.ended["server-0"] == mount.ended["server-2"], "at once: they may be of one node that does not answer"
    assert STUCK_S + HEARTBEAT_TIMEOUT_S - 1 <= mount.ended["server-0"] <= STUCK_S + HEARTBEAT_TIMEOUT_S + CACHE_S + 1
    assert {mount.opened[name] for name in ("controller-0", "server-0")} <= set(range(1, int(END_S / 45.0) + 1))
    assert mount.opened["trainer-0"] == 0, "its limit is longer"
    assert END_S / 2 < len(looks) <= END_S + 1, "processes beat once a second"
