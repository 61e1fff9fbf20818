"""vLLM worker of the weight-sync benchmark: the product's extension, and the other ways to get an adapter in.

``raw``    one broadcast of the same unique bytes into a buffer that is there already: the wire's limit
``usual``  one broadcast per Hugging Face tensor, ``.cpu()``, a new LoRAModel, remove then add
``file``   a PEFT folder on memory-backed disk, loaded by vLLM under a fresh name, remove then add
"""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import sync_case  # registers the backend of sockets  # noqa: F401
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from areal_lora.engine.vllm_ext.compat.weights import adapter_manager
from areal_lora.engine.vllm_ext.worker.extension import AdapterWorkerExtension
from areal_lora.weight_sync.link.broadcast_groups import BroadcastGroup, join_group
from areal_lora.weight_sync.messages import SourceEndpoint

_OTHER_ID = 1_000_000  # far from the product's own adapter ids
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class BenchExtension(AdapterWorkerExtension):
    """RPC methods; each stalls generation while it runs, as it does in the systems it stands for."""

    def bench_join(self, endpoint: bytes, secret: str, bind: str) -> None:
        decoded = msgspec.msgpack.decode(endpoint, type=SourceEndpoint)
        self._bench_flat, self._bench_count = torch.zeros(0, dtype=torch.uint8), 0

        def join() -> None:
            self._bench_group: BroadcastGroup = join_group(decoded, 1, bind, 60.0, secret)

        self._bench_thread = threading.Thread(target=join, daemon=True)
        self._bench_thread.start()

    def bench_raw(self, nbytes: int) -> None:
        """Receive in a thread; ``bench_raw_end`` returns the time (time.monotonic) of the last byte."""
        if self._bench_flat.numel() != nbytes:
            self._bench_flat = torch.zeros(nbytes, dtype=torch.uint8)
        self._bench_thread.join()

        def receive() -> None:
            self._bench_group.start(self._bench_flat, time.monotonic() + 60).wait()
            self._bench_end = time.monotonic()

        self._bench_thread = threading.Thread(target=receive, daemon=True)
        self._bench_thread.start()

    def bench_raw_end(self) -> float:
        self._bench_thread.join()
        return self._bench_end

    def bench_usual(self, names: list[tuple[str, list[int]]], dtype: str, rank: int, alpha: float) -> None:
        self._bench_thread.join()
        tensors = {}
        for name, shape in names:
            tensor = torch.empty(shape, dtype=DTYPES[dtype])
            self._bench_group.start(tensor.view(torch.uint8).view(-1), time.monotonic() + 60).wait()
            tensors[f"base_model.model.{name}"] = tensor.cpu()
        helper = PEFTHelper(r=rank, lora_alpha=int(alpha), target_modules=[])
        manager = adapter_manager(self)
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        lora = LoRAModel.from_lora_tensors(
            _OTHER_ID,
            tensors,
            helper,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        self._replace(lora)

    def bench_file(self, folder: str) -> None:
        self._bench_count += 1
        request = LoRARequest(f"file-{self._bench_count}", _OTHER_ID, folder)
        self._replace(WorkerLoRAManager._load_adapter(self.model_runner.lora_manager, request))  # type: ignore[attr-defined]

    def bench_forget(self) -> None:
        adapter_manager(self).remove_adapter(_OTHER_ID)

    def _replace(self, lora: LoRAModel) -> None:
        manager = adapter_manager(self)
        manager.remove_adapter(_OTHER_ID)
        manager.add_adapter(lora)
        manager.activate_adapter(_OTHER_ID)

    def bench_watch(self) -> None:
        """From now on remember when every model step ended and what it computed."""
        self._bench_steps: list[tuple[float, int, int]] = []
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        execute = runner.execute_model

        def watched(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            result = execute(scheduler_output, *args, **kwargs)
            resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
            again = sum(scheduler_output.num_scheduled_tokens[r] for r in resumed)
            self._bench_steps.append((time.monotonic(), scheduler_output.total_num_scheduled_tokens, again))
            return result

        runner.execute_model = watched

    def bench_steps(self) -> list[tuple[float, int, int]]:
        """(end, tokens, re-prefilled tokens) of every step since the last call."""
        steps, self._bench_steps = self._bench_steps, []
        return steps
