"""vLLM's two model runners: they tell our slots the same, and servers with either pass the same tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_lora.errors import AdapterError
from tests.process.engine.vllm_ext import test_keep, test_kept, test_server
from tests.support.engine.vllm_ext.second_server import SECOND_RUNNER, SECOND_SERVER
from tests.support.engine.vllm_ext.serving import RunningServer
from tests.support.paths import ROOT
from tests.support.sizes import NIGHTLY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # importing vLLM

ADAPTERS = {"first": 7, "second": None, "third": 9, "fourth": 7}
"""Adapter id by request; None is the base."""
TOKENS = np.array([3, 1, 2, 1], dtype=np.int32)


def request(lora_id: int | None) -> Any:
    from vllm.lora.request import LoRARequest

    return lora_id and LoRARequest(lora_name=f"a@v{lora_id}", lora_int_id=lora_id, lora_path="xccl://a")


def first_runner() -> tuple[Any, ...]:
    from vllm.v1.worker.gpu_input_batch import InputBatch

    batch = InputBatch.__new__(InputBatch)
    batch._req_ids = list(ADAPTERS)
    batch.req_id_to_index = {name: i for i, name in enumerate(ADAPTERS)}
    batch.request_lora_mapping = np.array([lora_id or 0 for lora_id in ADAPTERS.values()], dtype=np.int64)
    batch.lora_id_to_lora_request = {i: request(i) for i in ADAPTERS.values() if i}
    return batch.make_lora_inputs(TOKENS, np.ones_like(TOKENS))


def second_runner() -> tuple[Any, ...]:
    from vllm.v1.worker.gpu.lora_utils import LoraState

    state = LoraState(8)
    for index, (name, lora_id) in zip((5, 0, 3, 2), ADAPTERS.items(), strict=True):
        state.add_request(name, index, request(lora_id))
    return state.make_lora_inputs(list(ADAPTERS), np.array([5, 0, 3, 2]), TOKENS)


def rebuilt(inputs: tuple[Any, ...]) -> list[list[int | None]]:
    """The slots that the kernels were told of, step by step: a version of another adapter is committed between two."""
    from vllm.lora.model_manager import LRUCacheLoRAModelManager
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    from areal_lora.engine.vllm_ext.compat.weights import activate, deactivate

    told: list[list[int | None]] = []

    class Manager(LRUCacheLoRAModelManager):
        capacity, lora_slots = 4, 4

        def __init__(self) -> None:
            self.modules, self.lora_index_to_id = {}, [None] * 4
            self._registered_adapters, self._active_adapters = {}, {}
            self._last_mapping = self._last_slot_layout = None

        def _set_adapter_mapping(self, mapping: Any) -> None:
            by_id = {lora_id: slot for slot, lora_id in enumerate(self.lora_index_to_id)}
            assert all(lora_id == 0 or lora_id in by_id for lora_id in mapping.index_mapping)
            told.append([by_id.get(lora_id) if lora_id else None for lora_id in mapping.index_mapping])

        def deactivate_adapter(self, adapter_id: int) -> bool:
            self.lora_index_to_id[self.lora_index_to_id.index(adapter_id)] = None
            return bool(self._active_adapters.pop(adapter_id, True))

        def list_adapters(self) -> dict[int, Any]:
            return dict(self._registered_adapters)

    manager = LRUCacheWorkerLoRAManager.__new__(LRUCacheWorkerLoRAManager)
    manager._adapter_manager = Manager()
    runner = LoRAModelRunnerMixin()
    runner.lora_manager = manager
    worker = SimpleNamespace(model_runner=runner)
    manager._apply_adapters = lambda requests: None  # all of them are resident, see below
    activate(worker, 7, 2, 8)
    activate(worker, 9, 0, 8)
    for _ in range(2):
        runner._set_active_loras(*inputs)
    activate(worker, 11, 1, 8)
    runner._set_active_loras(*inputs)
    deactivate(worker, 11)
    runner._set_active_loras(*inputs)
    return told


def test_both_runners_tell_the_same_of_a_batch_and_the_kernels_hear_of_a_changed_slot() -> None:
    first, second = first_runner(), second_runner()
    tokens = (7, 7, 7, 0, 9, 9, 7)
    for prompts, by_token, requests in (first, second):
        assert tuple(map(int, prompts)) == (7, 0, 9, 7)
        assert tuple(map(int, by_token)) == tokens
        assert {r.lora_int_id for r in requests} == {7, 9}
    want = [2, 2, 2, None, 0, 0, 2]
    assert rebuilt(first) == rebuilt(second) == [want] * 3, "once, and after each change of the slots"


def test_a_models_class_is_inspected_without_a_new_interpreter(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models import registry

    from areal_lora.engine.vllm_ext.compat.engine import import_classes

    name = "Qwen3MoeForCausalLM"
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(registry, "_run_in_subprocess", None)
    monkeypatch.setitem(registry.ModelRegistry.models, name, lazy := registry.ModelRegistry.models[name])
    with pytest.raises(TypeError):
        lazy.inspect_model_cls()
    import_classes(str(tiny_model))
    assert registry.ModelRegistry.models[name].inspect_model_cls().architecture == name


def test_a_runner_that_is_neither_is_refused_by_name() -> None:
    from areal_lora.engine.vllm_ext.compat.model_runner import runner_of

    with pytest.raises(AdapterError, match="model runner is a SimpleNamespace"):
        runner_of(SimpleNamespace(model_runner=SimpleNamespace()))


@pytest.fixture(scope="module")
def second(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with the second one, its kernels interpreted, on vLLM's CPU build."""
    folder = tmp_path_factory.mktemp("second") / "run"
    yield from test_keep.served(folder, tiny_model, command=SECOND_SERVER, router_replay="rollout")


def test_ids_that_the_second_runner_keeps_are_those_of_the_rule(second: RunningServer) -> None:
    oracle = test_kept.Oracle(second)
    oracle.publish()
    test_kept.test_kept_ids_are_those_of_the_rule(second, oracle)


def test_routes_of_the_second_runner_are_of_the_version_that_read_each_token(
    second: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_keep, "LONG", test_keep.INTERPRETED)
    test_keep.test_routes_are_of_the_version_that_read_each_token(second)


def test_the_second_runner_scores_prompts_at_the_temperature_that_each_request_names(second: RunningServer) -> None:
    test_server.test_prompts_are_scored_at_the_temperature_that_each_request_names(second)


FURTHER = (
    "test_keep.py::test_a_running_answer_changes_its_version_and_keeps_its_cache",
    "test_keep.py::test_versions_that_no_sequence_is_on_leave_their_slots",
    "test_routes.py::test_routes_are_those_of_hugging_face",
    "test_routes.py::test_a_cached_answer_keeps_its_routes",
    "test_server.py::test_sampled_logprobs_are_those_of_the_policy_at_its_temperature",
    "test_many_adapters.py",
)
"""Of servers with the first one."""


@pytest.mark.skipif(not NIGHTLY, reason="takes minutes; make test-all")
def test_servers_with_the_second_runner_pass_further_tests_of_the_first(tmp_path: Path) -> None:
    tests = [str(Path(__file__).with_name(name)) for name in FURTHER]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # it is no lane
    command = [sys.executable, "-m", "pytest", "-q", f"--basetemp={tmp_path / 'tests'}", *tests]
    env = own | {SECOND_RUNNER: "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
