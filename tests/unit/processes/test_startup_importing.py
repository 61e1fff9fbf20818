from __future__ import annotations

import gc

import pytest

from areal_lora.processes.startup import collector_paused


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
