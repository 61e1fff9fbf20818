"""Names, sizes and states of what is resident beside an adapter. Real engines: tests/process/trainer/test_resume.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from areal_lora.checkpoint.state import Companion
from areal_lora.errors import ConfigError
from areal_lora.trainer import companions
from areal_lora.trainer.adapter import Adapter
from areal_lora.types import AdapterSpec
from tests.support.checkpoint.helpers import manifest_of
from tests.support.trainer.recorded import make_adapter

BOTH: dict[str, Any] = {"kind": "ppo", "kl_coef": 0.1, "reference": "initial", "reference_refresh_steps": 2}


class Engine:
    """Keeps what it was asked to hold."""

    def __init__(self, adapter: Adapter) -> None:
        self.specs = {adapter.name: adapter.spec}
        self.copied: list[tuple[str, str]] = []
        self.loaded: list[tuple[str, int]] = []

    def add_adapter(self, spec: AdapterSpec, optimizer: object, seed: int) -> None:
        self.specs[spec.name] = spec

    def freeze_copy(self, adapter: str, name: str) -> None:
        self.specs[name] = replace(self.specs[adapter], name=name)
        self.copied.append((adapter, name))

    def resident(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(spec=self.specs[name])

    def load_state(self, adapter: str, parts: object, step: int) -> None:
        self.loaded.append((adapter, step))


def begun(**algorithm: Any) -> tuple[Any, Adapter]:
    adapter = make_adapter(**algorithm)
    engine = Engine(adapter)
    companions.start(engine, adapter, seed=1)  # type: ignore[arg-type]
    return engine, adapter


def test_an_algorithm_without_critic_and_reference_has_no_companion() -> None:
    engine, adapter = begun(kl_coef=0.1)
    assert list(engine.specs) == ["gsm8k"]
    assert companions.resident(adapter) == {}


def test_a_critic_has_its_own_rate_at_the_same_rank_and_scale() -> None:
    engine, adapter = begun(kind="ppo", critic_lr=5e-3)
    spec = engine.specs["gsm8k/critic"]
    module = "model.layers.0.self_attn.q_proj"
    assert (spec.rank_of(module), spec.value_head) == (adapter.spec.rank, True)
    assert spec.scale_of(module) == adapter.spec.scale_of(module)
    assert (spec.target_modules, spec.base_model) == (adapter.spec.target_modules, adapter.spec.base_model)
    found = companions.critic_of(adapter)
    assert found is not None
    assert found.rate == pytest.approx(5e-3 / adapter.config.optimizer.lr)
    plain = companions.critic_of(make_adapter(kind="ppo"))
    assert plain is not None
    assert (plain.spec.rank, plain.rate) == (adapter.spec.rank, companions.RATE)


@pytest.mark.parametrize("rslora", [False, True])
def test_patterns_and_rslora_are_the_critics_too(rslora: bool) -> None:
    module, other = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"
    adapter = make_adapter(kind="ppo")
    spec = replace(adapter.spec, rslora=rslora, rank_pattern=(("q_proj", 3),))
    found = companions.critic_of(replace(adapter, spec=spec))
    assert found is not None
    assert (found.spec.rank_of(module), found.spec.rank_of(other)) == (3, adapter.spec.rank)
    assert found.spec.scale_of(other) == pytest.approx(spec.scale_of(other))


def test_the_reference_is_replaced_at_its_versions_only() -> None:
    engine, adapter = begun(**BOTH)
    assert engine.copied == [("gsm8k", "gsm8k/reference")]
    for version in range(1, 6):
        companions.renew(engine, adapter, version)
    assert len(engine.copied) == 1 + 2  # versions 2 and 4


def load(engine: Any, adapter: Adapter, kept: dict[str, Companion]) -> None:
    manifest = msgspec.structs.replace(manifest_of(4), companions=kept)
    companions.load(engine, adapter, manifest, Path("v000004"))


def kept_of(engine: Any) -> dict[str, Companion]:
    return {role: Companion(spec=engine.specs[f"gsm8k/{role}"], step=7) for role in ("critic", "reference")}


def test_what_a_checkpoint_has_is_loaded_with_its_clock(caplog: pytest.LogCaptureFixture) -> None:
    engine, adapter = begun(**BOTH)
    load(engine, adapter, kept_of(engine))
    assert engine.loaded == [("gsm8k/critic", 7), ("gsm8k/reference", 7)]
    assert caplog.text == ""


def test_a_critic_that_is_missing_is_a_new_one_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engine, adapter = begun(**BOTH)
    load(engine, adapter, {"reference": kept_of(engine)["reference"]})
    assert engine.loaded == [("gsm8k/reference", 7)]
    assert "v000004 has no critic: gsm8k gets a new one" in caplog.text


def test_a_reference_that_is_missing_is_refused() -> None:
    engine, adapter = begun(**BOTH)
    with pytest.raises(ConfigError, match=r"algorithm.reference.*without a reference.*set it to base"):
        load(engine, adapter, {"critic": kept_of(engine)["critic"]})


def test_a_critic_of_another_rank_is_refused() -> None:
    engine, adapter = begun(**BOTH)
    kept = kept_of(engine)
    other = replace(kept["critic"].spec, rank=3, alpha=6.0)
    with pytest.raises(ConfigError, match=r"algorithm.kind.*rank 3 and alpha 6, not 8 and 16"):
        load(engine, adapter, {**kept, "critic": Companion(spec=other, step=7)})
