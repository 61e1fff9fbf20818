"""Put the device of `device.cpp` into a process, and what `torch.cuda` says of it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")
BUILT = Path(sys.prefix, "wheels of tests")
NAME, GIB = "NVIDIA H200", 2**30
_loaded: list[Any] = []


def _library(torch_folder: Path) -> Path:
    """Compile the device once for each source, torch and Python."""
    source = SOURCE.read_bytes()
    key = blake2b(source + f"{version('torch')} {sysconfig.get_platform()}".encode(), digest_size=8).hexdigest()
    library = BUILT / f"device-{key}.so"
    if library.exists():
        return library
    BUILT.mkdir(exist_ok=True)
    headers = [f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}"]
    with tempfile.TemporaryDirectory(dir=BUILT) as made:
        built = Path(made, library.name)
        command = ["g++", "-std=c++20", "-shared", "-fPIC", "-O1", *headers, str(SOURCE), "-o", str(built)]
        subprocess.run([*command, f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"], check=True)
        os.rename(built, library)
    return library


def load() -> None:
    """Give this process the device. torch must not have been imported: it looks for a device once."""
    if sys.argv and sys.argv[0].endswith(("pip", "pip/__main__.py")):
        return
    assert "torch" not in sys.modules
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(folder / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    device = ctypes.CDLL(str(_library(folder)), mode=ctypes.RTLD_GLOBAL)
    device.emulated_held.restype = device.emulated_peak.restype = ctypes.c_int64
    device.emulated_counts.restype = ctypes.c_char_p
    import torch

    _patch(torch, device)
    from tests.support.gpu.emulated import flash

    _loaded.extend([device, flash.install()])


def counts() -> Counter[str]:
    """Since the start of this process: launches by operator, ``waits: WHAT`` of the host, copies, bytes."""
    lines = _loaded[0].emulated_counts().decode().splitlines()
    return Counter({name: int(n) for name, _, n in (line.rpartition("\t") for line in lines)})


def _patch(torch: Any, device: Any) -> None:
    cuda = torch.cuda

    class Stream(torch.Stream):  # type: ignore[misc, name-defined]
        def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Any:
            return super().__new__(cls, **known) if known else super().__new__(cls, device="cuda", priority=priority)

    def event(enable_timing: bool = False, **_: Any) -> Any:
        return torch.Event(device="cuda", enable_timing=enable_timing)

    def nothing() -> Any:  # torch.compile has a table of functions: each has one name
        return lambda *_, **__: None

    about = {"multi_processor_count": 132, "total_memory": 140 * GIB, "major": 9, "minor": 0, "name": NAME}
    known = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: NAME,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(**about),
        "is_bf16_supported": lambda *_: True,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *_: (140 * GIB - device.emulated_held(), 140 * GIB),
        "memory_allocated": lambda *_: device.emulated_held(),
        "memory_reserved": lambda *_: device.emulated_held(),
        "max_memory_allocated": lambda *_: device.emulated_peak(),
        "synchronize": lambda *_: device.emulated_synchronize(),
        "Stream": Stream,
        "Event": event,
        "current_stream": lambda *_: torch.accelerator.current_stream(),
        "default_stream": lambda *_: torch.accelerator.current_stream(),
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "device": lambda _: contextlib.nullcontext(),
        "default_generators": (torch.default_generator,),
    }
    known |= {name: nothing() for name in ("_lazy_init", "set_device", "empty_cache", "reset_peak_memory_stats")}
    of_generators = {
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state.cpu()),
        "initial_seed": torch.initial_seed,
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "manual_seed_all": nothing(),
        "_lazy_init": nothing(),
        "_lazy_call": lambda call, **_: call(),
    }
    for name, value in (known | of_generators).items():
        setattr(cuda, name, value)
    for name, value in of_generators.items():
        setattr(cuda.random, name, value)
    resize = torch.UntypedStorage.resize_

    def resize_storage(self: Any, nbytes: int) -> Any:
        """torch's own is compiled with CUDA only."""
        if self.device.type != "cuda":
            return resize(self, nbytes)
        if nbytes != self.nbytes():
            torch.ops.emulated.resize_storage(torch.empty(0, dtype=torch.uint8, device="cuda").set_(self), nbytes)
        return self

    torch.UntypedStorage.resize_ = resize_storage
    gather = torch.distributed.all_gather

    def all_gather(outputs: Any, own: Any, group: Any = None, async_op: bool = False) -> Any:
        """As NCCL, which gathers unequal sizes, too."""
        if not own.is_cuda or len({each.shape for each in outputs}) == 1:
            return gather(outputs, own, group, async_op)
        assert not async_op
        outputs[torch.distributed.get_rank(group)].copy_(own)
        for rank, each in enumerate(outputs):
            torch.distributed.broadcast(each, group=group, group_src=rank)

    torch.distributed.all_gather = all_gather
    from areal_lora.platforms.device import COLLECTIVES

    COLLECTIVES["cuda"] = "cpu:gloo,cuda:gloo"
