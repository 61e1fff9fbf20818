"""msgspec looks a type up when it is first decoded; threads that do so at once end the process (a segfault)."""

from __future__ import annotations

import gc
from importlib import import_module

import msgspec
import pytest

from areal_lora.service.queue import queue_rows

DECODED_BY_THREADS = (
    "areal_lora.distributed.store",
    "areal_lora.engine.vllm_ext.worker.channel",
    "areal_lora.run_folder.rendezvous",
    "areal_lora.weight_sync.messages",
)


def looked_up(kind: type) -> bool:
    return any(type(found).__name__ == "StructInfo" for found in gc.get_referents(kind))


def test_the_first_decoder_looks_a_type_up() -> None:
    class Fresh(msgspec.Struct):
        number: int

    assert not looked_up(Fresh)
    msgspec.msgpack.Decoder(Fresh)
    assert looked_up(Fresh)


@pytest.mark.parametrize("name", DECODED_BY_THREADS)
def test_types_that_threads_decode_are_looked_up_at_import(name: str) -> None:
    kinds = [each for each in vars(import_module(name)).values() if isinstance(each, type)]
    found = [each for each in kinds if issubclass(each, msgspec.Struct) and each.__module__ == name]
    assert found
    bases = {base for each in found for base in each.__bases__}
    assert [each.__name__ for each in found if each not in bases and not looked_up(each)] == []


def test_types_in_the_rows_of_the_service_are_looked_up_with_its_tables() -> None:
    import_module("areal_lora.service.queue.queue_store")
    assert looked_up(queue_rows.Lora)
    assert looked_up(queue_rows.Quota)
