"""Start vLLM's engine, and find its files in shared memory."""

import gc
import os
import signal
import socket
import stat
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm import AsyncEngineArgs
from vllm.logprobs import FlatLogprobs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore

from areal_lora.families.shape import read_hf_config
from areal_lora.processes.startup import die_with_parent

WHOLE = "areal_lora_whole"
"""Key in ``SamplingParams.extra_args``: the reader needs the request's tokens only when it has ended
(`compat.cpu_scheduler`; elsewhere without effect)."""
_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


class EngineLoad(NamedTuple):
    """The share of the KV cache in use, sequences that have places in it and that wait, and preemptions by sequence."""

    kv_cache_share: float
    running: int
    waiting: int
    preempted: dict[str, int]


def load_now(core: EngineCore) -> EngineLoad:
    """As a method of vLLM's engine core: `AsyncLLM` has no call without statistics, which cost time at every step."""
    scheduler = core.scheduler
    preempted = {name: r.num_preemptions for name, r in scheduler.requests.items() if r.num_preemptions}
    running, waiting = scheduler.get_request_counts()
    return EngineLoad(scheduler.get_kv_cache_usage(), running, waiting, preempted)


async def read_load(engine: AsyncLLM) -> EngineLoad:
    """`load_now` of an engine of `start_engine`, which answers between two model steps."""
    return EngineLoad(*await engine.engine_core.call_utility_async(load_now.__name__))


def follow_version(core: EngineCore, follow_id: int, lora_id: int) -> dict[str, tuple[int, int]]:
    """From the next model step on, compute the requests with adapter id ``follow_id`` as those with ``lora_id``.

    Return what each of them has by now: tokens sampled and tokens in the KV cache. As a method of vLLM's engine core:
    workers do not know which requests wait.
    """
    sampled: dict[str, int] = core.collective_rpc("al_follow", args=(follow_id, lora_id))[0]
    following = [
        r for r in core.scheduler.requests.values() if r.lora_request and r.lora_request.lora_int_id == follow_id
    ]
    return {r.request_id: (sampled.get(r.request_id, 0), r.num_computed_tokens) for r in following}


async def call_follow_version(engine: AsyncLLM, follow_id: int, lora_id: int) -> dict[str, tuple[int, int]]:
    """`follow_version` of an engine of `start_engine`."""
    found: dict[str, tuple[int, int]] = await engine.engine_core.call_utility_async(
        follow_version.__name__, follow_id, lora_id
    )
    return found


def start_engine(arguments: AsyncEngineArgs) -> AsyncLLM:
    """Start vLLM's engine (`fork_engines`). Call this once per process."""
    if current_platform.is_cpu():
        import_classes(arguments.model)
    fork_engines()
    FlatLogprobs.append_fast, FlatLogprobs.extend = append_kept, extend_kept
    extend_engine_core()
    config = arguments.create_engine_config()
    return AsyncLLM.from_vllm_config(config, disable_log_stats=arguments.disable_log_stats)


def extend_engine_core() -> None:
    """Give vLLM's engine core the methods that the server calls: also in an engine that is spawned, as under WSL."""
    for method in (load_now, follow_version):
        setattr(EngineCore, method.__name__, method)


def append_kept(
    self: FlatLogprobs, token_ids: list[int], logprobs: list[float], ranks: Any, decoded_tokens: Any
) -> None:
    """As a method of vLLM's flat log-probabilities: 8 bytes of each token and of each id that it has or keeps.

    The sampled token comes first, then all from the likeliest on, as many as the request has ``ranks``.
    """
    if not self.start_indices:
        _as_arrays(self)
    logprobs = logprobs[: len([*ranks])]  # a batch's rows are as wide as its widest request's
    n = logprobs.index(-torch.inf, 1) if -torch.inf in logprobs[1:] else len(logprobs)
    self.start_indices.append(len(self.logprobs))
    self.token_ids.extend(token_ids[:n])
    self.logprobs.extend(logprobs[:n])
    self.end_indices.append(len(self.logprobs))


def extend_kept(self: FlatLogprobs, following: FlatLogprobs) -> None:
    """As a method of vLLM's flat log-probabilities, for parts of a stream that it joins."""
    if not self.start_indices:
        _as_arrays(self)
    first = len(self.logprobs)
    self.start_indices.extend(first + at for at in following.start_indices)
    self.end_indices.extend(first + at for at in following.end_indices)
    self.token_ids.extend(following.token_ids)
    self.logprobs.extend(following.logprobs)


def _as_arrays(empty: FlatLogprobs) -> None:
    empty.start_indices, empty.end_indices = array("i"), array("i")
    empty.token_ids, empty.logprobs = array("i"), array("f")


def fork_engines() -> None:
    """Have vLLM start an engine's processes as forks of this one, which has imported what they need.

    On CPUs vLLM would start new interpreters, for the sake of OpenMP: a thread pool does not survive a fork. This
    process has not computed and has no pool. It must not have other threads either. On GPUs vLLM forks by itself
    unless CUDA is in use.
    """
    start = AsyncLLM.from_vllm_config

    def from_vllm_config(*arguments: Any, **options: Any) -> AsyncLLM:
        os.environ[_START_METHOD] = "fork"  # its configuration has set it
        os.register_at_fork(after_in_child=_leave_server)
        gc.freeze()  # otherwise the first collection in a fork would copy all memory of Python objects
        return start(*arguments, **options)

    AsyncLLM.from_vllm_config = from_vllm_config


def import_classes(model: str) -> None:
    """Import the classes of the model in a folder; not on a GPU, since an import may initialize CUDA.

    vLLM inspects a class that is not imported in a new interpreter, once per machine, which takes ten seconds.
    """
    for name in read_hf_config(Path(model)).get("architectures") or ():
        if lazy := ModelRegistry.models.get(name):
            ModelRegistry.register_model(name, lazy.load_model_cls())


def _leave_server() -> None:
    """Cut a forked engine process off from the server: its end, its event loop's signals, vLLM's queues of the server.

    The server's own ports close by hooks of their own.
    """
    die_with_parent(signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    for name in os.listdir("/proc/self/fd"):
        if _listens_on_a_path(int(name)):
            os.close(int(name))  # zmq's, which has no threads here and does not use it


def _listens_on_a_path(number: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False
    except OSError:  # the descriptor of the listing itself, which is closed by now
        return False
    with socket.socket(fileno=os.dup(number)) as copy:
        return copy.family == socket.AF_UNIX and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
