"""Which scopes canonical targets cover."""

from __future__ import annotations

from areal_lora.families.family import Scope, covers


def test_covers() -> None:
    assert covers(("linear_fc1",), "linear_fc1", Scope.EXPERT)
    assert covers(("expert.linear_fc1",), "linear_fc1", Scope.ALL_EXPERTS)
    assert not covers(("expert.linear_fc1",), "linear_fc1", Scope.SHARED_EXPERT)
    assert not covers(("expert.linear_fc1",), "linear_fc2", Scope.EXPERT)
