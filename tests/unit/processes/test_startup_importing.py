from __future__ import annotations

import gc
import weakref

import pytest

from areal_lora.processes.startup import FULL_EVERY_S, collector_paused, rare_full_collections
from tests.support.clocks import Clock


def test_nothing_is_collected_in_the_block_and_all_that_exists_is_left_alone_afterwards() -> None:
    frozen = gc.get_freeze_count()
    try:
        with collector_paused():
            assert not gc.isenabled()
            kept: list[object] = [[i] for i in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= frozen + len(kept)
    finally:
        gc.unfreeze()


def test_a_failed_import_leaves_the_collector_on() -> None:
    with pytest.raises(ModuleNotFoundError), collector_paused():
        raise ModuleNotFoundError
    assert gc.isenabled()
    gc.unfreeze()


class Old:
    def __init__(self) -> None:
        self.me = self


def test_old_garbage_waits_for_its_time_and_young_garbage_does_not() -> None:
    before, clock = gc.get_threshold(), Clock()
    with rare_full_collections(clock) as collect:
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold()[2] > 1_000_000
        old = Old()
        seen = weakref.ref(old)
        gc.collect(1)  # what has survived this is old
        del old
        made = weakref.ref(Old())
        gc.collect(1)
        assert made() is None
        clock.now += FULL_EVERY_S - 1
        collect()
        assert seen() is not None
        clock.now += 1
        collect()
        assert seen() is None
    assert gc.get_threshold() == before
