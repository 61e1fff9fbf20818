"""The table of what works together: the start-up check says of every combination what the table says."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import get_args

import pytest

from areal_lora.config import support
from areal_lora.config.sections.adapter import Kind
from areal_lora.config.support import (
    ENGINES,
    LAYOUTS,
    MODES,
    PACKED,
    REFUSALS,
    UNSERVED,
    Combination,
    Need,
    engines,
    group_of,
    refusals,
)
from areal_lora.families.registry import FAMILIES, supported
from tests.support.combinations import Refused, config_of, said

UNKNOWN = "gpt2"
KINDS: tuple[Kind, ...] = get_args(Kind)


def agrees(c: Combination) -> bool:
    """Every refusal of the table is in the errors, with its words, and nothing else is."""
    expected, found = refusals(c), said(c)
    named = {r for r in expected for path, reason in found if path == r.key and r.text(c.family) in reason}
    explained = {
        (path, reason) for path, reason in found for r in expected if path == r.key and r.text(c.family) in reason
    }
    return set(expected) == named and found == explained


def disagreements(combinations: Iterable[Combination]) -> list[tuple[Combination, Refused]]:
    return [(c, said(c)) for c in combinations if not agrees(c)]


def has_experts(family: str) -> tuple[bool, ...]:
    if family in supported():
        return (FAMILIES.rows[family].experts is not None,)
    return (False, True)


def test_engines_families_layouts_and_modes_are_judged_as_the_table_says() -> None:
    """Every combination of the four. A model without experts has no layout ``per_expert``: it is ``none``."""
    every = [
        Combination(engine=engine, family=family, experts=experts, layout=layout, mode=mode)
        for engine, family, layout, mode in product(ENGINES, (*supported(), *PACKED, UNKNOWN), LAYOUTS, MODES)
        for experts in has_experts(family)
        if experts or layout != "per_expert"
    ]
    assert len(every) > 800
    assert disagreements(every) == []
    assert any(refusals(c) for c in every)
    assert sum(not refusals(c) for c in every) > 150


def test_every_algorithm_is_judged_alike_everywhere() -> None:
    every = [
        Combination(algorithm=kind, engine=engine, layout=layout, mode=mode, needs=own_asks(kind))
        for kind, engine, layout, mode in product(KINDS, ENGINES, LAYOUTS, MODES)
    ]
    assert disagreements(every) == []
    assert not any(refusals(c) for c in every)


def own_asks(kind: Kind) -> frozenset[Need]:
    """What a preset needs for by itself."""
    needs: dict[str, frozenset[Need]] = {"ppo": frozenset({"critic"}), "remax": frozenset({"greedy answers"})}
    return needs.get(kind, frozenset())


@pytest.mark.parametrize(
    "needs",
    [*({ask} for ask in support.NEEDS), *(set(r.needs) for r in REFUSALS if r.needs)],
    ids=lambda needs: " and ".join(sorted(needs)),
)
def test_what_is_asked_for_is_judged_as_the_table_says(needs: set[Need]) -> None:
    every = [
        Combination(engine=engine, layout=layout, mode=mode, needs=frozenset(needs))
        for engine, layout, mode in product(ENGINES, LAYOUTS, MODES)
    ]
    assert disagreements(every) == []


def test_the_combination_of_a_configuration_is_the_one_that_it_was_made_for() -> None:
    for needs in ({"critic", "several adapters"}, {"KL to a version", "given answers", "an agent"}):
        c = Combination(layout="shared", mode="merged", engine="fsdp", needs=frozenset(needs))
        found = support.combination_of(config_of(c), config_of(c).adapters[0], "qwen3_moe", None)
        assert (found.needs, found.layout, found.mode, found.engine) == (c.needs, c.layout, c.mode, c.engine)


def test_several_problems_of_one_key_are_all_reported() -> None:
    c = Combination(engine="fsdp", family="phi3", experts=False, mode="merged", needs=frozenset({"several adapters"}))
    assert {path for path, _ in said(c)} == {"rollout.adapter_mode"}
    assert len(said(c)) == 2


def test_a_refusal_can_be_lifted_and_the_check_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check has no second opinion: what the table does not refuse, nothing refuses."""
    monkeypatch.setattr(support, "REFUSALS", ())
    for refusal in REFUSALS:
        if refusal.key != support.MODEL:
            c = next(c for c in some() if refusal.matches(c))
            assert said(c) == set(), refusal.reason


def some() -> Iterable[Combination]:
    needs = [frozenset(), *(r.needs for r in REFUSALS if r.needs)]
    for family, layout, mode, ask in product(("qwen3_moe", "qwen3", "phi3", "bitnet"), LAYOUTS, MODES, needs):
        engine = "megatron" if group_of(family) == "row" else "fsdp"
        yield Combination(
            engine=engine, family=family, experts=family == "qwen3_moe", layout=layout, mode=mode, needs=ask
        )


def test_a_family_without_a_row_is_for_the_fsdp_engine() -> None:
    assert engines({"model_type": "qwen3"}) == ("megatron", "fsdp")
    assert engines({"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True}) == ("fsdp",)
    assert engines({"model_type": "phi3"}) == ("fsdp",)
    assert engines({"model_type": "phi3", "layer_types": ["linear_attention"]}) == ()
    assert engines({"model_type": "gpt2"}) == ()


def test_what_vllm_serves() -> None:
    assert [group_of(kind) for kind in ("qwen3", "phi3", "bitnet", "gpt2")] == [
        "row",
        "no row",
        "not served",
        "unknown",
    ]
    assert {kind for kind in PACKED if group_of(kind) == "not served"} == UNSERVED
