"""Rank 0's look at a newcomer: the rules of a start, and a desired state that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_lora.config.facts import gather_facts
from areal_lora.config.load import load_config
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.recorded import joined
from areal_lora.config.rules.findings import resolve_targets
from areal_lora.errors import ArealLoraError
from areal_lora.obs.metrics.records import AdapterStateRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.run_folder.paths import DesiredAdapter, DesiredAdapters, DesiredWatch, RunFolder, write_desired
from areal_lora.tasks.check import joining
from areal_lora.trainer.collective.joining import recorded_as_final
from areal_lora.types import AdapterPhase
from tests.support.paths import EXAMPLES


def checked(config: Config, desired: DesiredAdapter) -> AdapterConfig:
    return joining(config, joined(config, desired), online=True)


def service(**section: Any) -> Config:
    """A service without adapters on the tiny base."""
    base = yaml.safe_load((EXAMPLES / "three_adapters.yaml").read_text())
    base["model"]["path"] = str(EXAMPLES / "tiny_model")
    base["rollout"]["max_adapters"] = 2
    config = load_config([base | {"adapters": [], "service": section}])
    return resolve_targets(config, gather_facts(config, runs_here=False))


def newcomer(**changes: Any) -> DesiredAdapter:
    [first, *_] = yaml.safe_load((EXAMPLES / "three_adapters.yaml").read_text())["adapters"]
    section = {key: value for key, value in (first | changes).items() if key != "name"}
    return DesiredAdapter(name="new", incarnation=1, adapter=section)


def test_one_that_passes_has_resolved_targets() -> None:
    found = checked(service(), newcomer(target_modules=["attention"]))
    assert (found.name, found.target_modules) == ("new.1", ["linear_proj", "linear_qkv"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rank": 64}, "rank: rank 64 is above the servers' rollout.max_lora_rank = 8"),
        ({"target_modules": ["linear_fc9"]}, "target_modules: "),
        ({"max_staleness": 9}, "max_staleness: 9 is above rollout.max_staleness"),
        ({"expert_layout": "spread"}, "expert_layout: "),
        ({"reward": {"kind": "unknown"}}, r"reward\.kind: "),
        ({"reward": {"kind": "function", "path": "/no/such.py:reward"}}, r"reward\.path: "),
        ({"task": {"kind": "dataset", "train": "/no/such.jsonl"}}, r"task\.train: "),
        ({"init_from": "/no/such/adapter"}, "init_from: "),
        ({"sampling": {"prompts_per_step": 1, "n_samples": 8, "max_new_tokens": 9999}}, r"sampling\.max_new_tokens: "),
    ],
)
def test_one_that_breaks_a_rule_of_a_start_is_refused_with_its_key(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ArealLoraError, match=f"^{says}"):
        checked(service(), newcomer(**changes))


def test_modules_for_which_servers_have_no_room_are_refused() -> None:
    narrow = service(target_modules=["attention"])
    assert checked(narrow, newcomer()).rank == 8
    with pytest.raises(ArealLoraError, match=r"^target_modules: servers have no room for model\.layers"):
        checked(narrow, newcomer(target_modules=["all-linear"]))


def test_a_desired_state_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a run")
    first = DesiredAdapters(generation=1, adapters=(newcomer(),))
    write_desired(folder, first)
    found = DesiredWatch(folder)
    assert found.look() == first
    folder.desired.write_text("{")
    assert [found.look(), found.look()] == [first, first]
    folder.desired.unlink()
    write_desired(folder, DesiredAdapters(generation=2, closed=True))
    assert found.look() == DesiredAdapters(generation=2, closed=True)
    assert found.newest.closed


def test_what_is_done_or_deleted_stays_so_in_the_next_session(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a run")
    writer = MetricsWriter(folder)
    for key, *phases in (("a.1", "active", "done"), ("b.1", "active", "deleted"), ("c.1", "failed"), ("d.1", "paused")):
        for phase in phases:
            writer.write(AdapterStateRecord(adapter=key, state=AdapterPhase(phase), version=0))
    writer.close()
    assert recorded_as_final(folder) == {"a.1": AdapterPhase.DONE, "b.1": AdapterPhase.DELETED}
