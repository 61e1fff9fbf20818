"""Decisions about operations, as data."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from hypothesis import given, settings, strategies as st

from areal_lora.errors import RequestError
from areal_lora.run_folder.paths import DesiredPhase
from areal_lora.service.queue.client_sessions import AdapterRequest, carried_out, changed, create
from areal_lora.service.queue.queue_rows import Quota, Tables, Verb
from areal_lora.types import AdapterPhase
from tests.support.service.tables import after

QUOTA = Quota(adapters=2, rank=8, weight=1.0, operations=3, body_kib=1, sequences=64, problems=9, workers=1)
EMPTY = Tables(quotas=MappingProxyType({"acme": QUOTA, "bolt": QUOTA}))


def request(name: str = "math", rank: int = 4, weight: float = 1.0) -> AdapterRequest:
    return AdapterRequest(name=name, rank=rank, weight=weight, settings={"rank": rank})


def with_adapters(*names: tuple[str, str], tables: Tables = EMPTY) -> Tables:
    for tenant, name in names:
        tables = after(tables, create(tables, tenant, request(name), now_s=1.0))
    return tables


def refusal(call: object) -> tuple[int, str]:
    with pytest.raises(RequestError) as refused:
        call()  # type: ignore[operator]
    return refused.value.status, refused.value.path


def test_two_tenants_have_the_same_name_and_one_tenant_has_it_once() -> None:
    tables = with_adapters(("acme", "math"), ("bolt", "math"))
    assert [row.key for row in tables.adapters.values()] == ["acme-math.1", "bolt-math.1"]
    assert refusal(lambda: create(tables, "acme", request(), now_s=1.0)) == (422, "name")


def test_a_name_that_is_used_again_has_another_incarnation() -> None:
    tables = with_adapters(("acme", "math"))
    tables = after(tables, changed(tables, {}, "acme", "math", Verb.DELETE))
    assert create(tables, "acme", request(), now_s=1.0).key == "acme-math.2"
    assert create(tables, "bolt", request(), now_s=1.0).key == "bolt-math.1"


def test_quotas() -> None:
    full = with_adapters(("acme", "a"), ("acme", "b"))
    assert refusal(lambda: create(full, "acme", request("c"), now_s=1.0)) == (429, "name")
    assert create(full, "bolt", request("c"), now_s=1.0).name == "c", "a quota is of one tenant"
    assert refusal(lambda: create(EMPTY, "acme", request(rank=9), now_s=1.0)) == (422, "rank")
    assert refusal(lambda: create(EMPTY, "acme", request(weight=1.5), now_s=1.0)) == (422, "weight")


def test_a_queue_is_full_until_the_run_carries_operations_out_and_a_delete_is_always_taken() -> None:
    tables = with_adapters(("acme", "a"))
    for verb in (Verb.PAUSE, Verb.RESUME):
        tables = after(tables, changed(tables, {}, "acme", "a", verb))
    assert refusal(lambda: changed(tables, {}, "acme", "a", Verb.PAUSE)) == (429, "operations")
    assert changed(tables, {}, "acme", "a", Verb.DELETE).wanted is DesiredPhase.DELETED
    assert carried_out(tables, {}) == []
    assert carried_out(tables, {"acme-a.1": AdapterPhase.PAUSED}) == []
    [row] = carried_out(tables, {"acme-a.1": AdapterPhase.ACTIVE})
    assert row.open == 3


@pytest.mark.parametrize("verb", [Verb.PAUSE, Verb.RESUME])
@pytest.mark.parametrize("phase", [AdapterPhase.DONE, AdapterPhase.FAILED])
def test_what_has_ended_neither_pauses_nor_resumes(verb: Verb, phase: AdapterPhase) -> None:
    tables = with_adapters(("acme", "a"))
    assert refusal(lambda: changed(tables, {"acme-a.1": phase}, "acme", "a", verb)) == (422, "name")
    assert changed(tables, {"acme-a.1": phase}, "acme", "a", Verb.DELETE).wanted is DesiredPhase.DELETED


@pytest.mark.parametrize("verb", [Verb.PAUSE, Verb.RESUME, Verb.DELETE])
def test_an_adapter_of_another_tenant_is_not_there(verb: Verb) -> None:
    tables = with_adapters(("bolt", "a"))
    assert refusal(lambda: changed(tables, {}, "acme", "a", verb)) == (404, "name")


@pytest.mark.parametrize("name", ["", "A", "a b", "-a", "a/b", "a.b", "a@v1", "ä", "a" * 48, "a\n", "../a"])
def test_names(name: str) -> None:
    assert refusal(lambda: create(EMPTY, "acme", request(name), now_s=1.0)) == (422, "name")


STEPS = st.tuples(st.sampled_from(["acme", "bolt"]), st.sampled_from(["a", "b", "c"]), st.sampled_from(list(Verb)))


@settings(max_examples=200, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_no_key_of_the_run_recurs_and_no_quota_is_passed(steps: list[tuple[str, str, Verb]]) -> None:
    """Against a model of sets, for any order of operations."""
    tables, model, keys = EMPTY, dict[tuple[str, str], str](), set[str]()
    for tenant, name, verb in steps:
        running = {row.key: AdapterPhase.ACTIVE for row in tables.adapters.values()}
        try:
            if verb is Verb.CREATE:
                row = create(tables, tenant, request(name), now_s=1.0)
                assert row.key not in keys
                keys.add(row.key)
            else:
                row = changed(tables, running, tenant, name, verb)
        except RequestError as refused:
            status = refused.status
        else:
            status = 0
        if status:
            there = (tenant, name) in model
            assert status == 429 or (status == 422 and there) or (status == 404 and not there)
            continue
        tables = after(tables, row)
        if verb is Verb.DELETE:
            del model[tenant, name]
        else:
            model[tenant, name] = "paused" if verb is Verb.PAUSE else "active"
        assert {at: row.wanted.value for at, row in tables.adapters.items()} == model
        assert all(sum(at[0] == one for at in model) <= 2 for one in ("acme", "bolt"))
