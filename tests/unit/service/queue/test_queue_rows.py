"""Names of the run, tables after an operation, and keys."""

from __future__ import annotations

import re

import pytest

from areal_lora.run_folder.paths import NAME as RUN_NAME, DesiredPhase
from areal_lora.service.queue.queue_rows import NAME, TENANT, AdapterRow, Tables, digest_of, new_key
from tests.support.service.tables import after


def row(tenant: str = "acme", name: str = "math", incarnation: int = 1, wanted: str = "active") -> AdapterRow:
    return AdapterRow(
        tenant=tenant, name=name, incarnation=incarnation, wanted=DesiredPhase(wanted), settings={}, created_s=0.0
    )


@pytest.mark.parametrize("others", [("a", "b-c", "ab", "c"), ("a", "b", "a", "b-b"), ("a1", "1", "a", "1-1")])
def test_no_two_tenants_share_a_name_of_the_run(others: tuple[str, str, str, str]) -> None:
    first, second = row(*others[:2]), row(*others[2:])
    assert TENANT.fullmatch(first.tenant)
    assert NAME.fullmatch(first.name)
    assert first.key != second.key
    assert RUN_NAME.fullmatch(first.desired.name)


def test_the_longest_names_are_names_of_the_run() -> None:
    assert RUN_NAME.fullmatch(row("a" * 16, "b" * 47).desired.name)
    assert not TENANT.fullmatch("a" * 17)
    assert not NAME.fullmatch("b" * 48)
    assert not TENANT.fullmatch("a-b"), "the first dash would end the tenant elsewhere"


def test_a_deleted_adapter_is_not_desired_and_its_incarnation_is_remembered() -> None:
    tables = after(Tables(), row(incarnation=3), row(name="other"), row(incarnation=3, wanted="deleted"))
    tables = after(tables, row(name="third", incarnation=2), row(name="third", incarnation=2, wanted="deleted"))
    assert [each.key for each in tables.desired()] == ["acme-other.1"]
    assert tables.deleted == {"acme": 3}


def test_a_key_is_random_and_only_its_digest_is_kept() -> None:
    keys = {new_key() for _ in range(50)}
    assert len(keys) == 50
    assert all(re.fullmatch(r"tml-[0-9a-f]{64}", key) for key in keys)
    assert len({digest_of(key) for key in keys}) == 50
    assert digest_of("\udcff") != digest_of("x"), "any header can be looked up"
