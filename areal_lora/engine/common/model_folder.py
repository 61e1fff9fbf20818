"""The safetensors files of a Hugging Face model folder.

With ``model.shared_memory`` one copy of the base per node: files in shared memory, read from disk once.

    disk            /dev/shm                                       processes of the node
    a.safetensors   areal_lora-base-<identity of a> (first rank)   map it, cut their part, keep a lease
    b.safetensors   areal_lora-base-<identity of b> (second rank)  map it, cut their part, keep a lease

Each process starts with another file, so several read from disk at once; a process that needs a file which another
one is reading waits for it. Locks are the kernel's, so a killed process holds none:

- The record lock of a file lets one process fill it. A file that is shorter than its source was started by a killed one
  and is filled again.
- The lease is a shared flock until the process ends. The launcher finds the open descriptor and removes the file
  after the run (`processes.shared_memory`); without a launcher on the node the last process that ends removes it.
  What only killed processes have left is attached by the next one with the same base, or removed by it.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from areal_lora.config.models import ModelConfig
from areal_lora.errors import EnvironmentError_, UnknownTensorError
from areal_lora.families.safetensors_head import weight_files

if TYPE_CHECKING:
    from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "areal_lora-base-"
_CHUNK_BYTES = 16 << 20


def share(files: Sequence[Path], first: int = 0, memory: Path = SHARED_MEMORY) -> list[Path]:
    """The copies of ``files`` in shared memory, whole until this process ends.

    ``first`` is the first file. Raises EnvironmentError_ where shared memory is missing or too small.
    """
    # The name is of this user's file in its present state.
    states = [f"{os.getuid()}\0{f.resolve()}\0{f.stat().st_size}\0{f.stat().st_mtime_ns}".encode() for f in files]
    copies = [memory / f"{PREFIX}{hashlib.blake2b(state, digest_size=16).hexdigest()}" for state in states]
    _sweep(memory, {copy.name for copy in copies})
    for i in range(len(files)):
        at = (first + i) % len(files)
        _attach(files[at], copies[at])
    return copies


def _attach(source: Path, copy: Path) -> None:
    """Take a lease of ``copy``, and fill it unless it is whole."""
    while True:
        try:
            fd = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _refused(source, copy, error) from error
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink:
            break
        os.close(fd)  # another process has removed it since
    atexit.register(_close, fd, copy)  # the last process removes the copy
    fcntl.lockf(fd, fcntl.LOCK_EX)
    try:
        if os.fstat(fd).st_size != source.stat().st_size:
            os.ftruncate(fd, 0)  # written from the start, so the size shows whether the copy is whole
            with source.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                while os.sendfile(fd, file.fileno(), None, _CHUNK_BYTES):
                    pass
    except OSError as error:
        copy.unlink(missing_ok=True)
        raise _refused(source, copy, error) from error
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)


def _sweep(memory: Path, keep: set[str]) -> None:
    """Remove the copies of other bases that only killed processes have left."""
    for copy in memory.glob(f"{PREFIX}*"):
        if copy.name in keep:
            continue
        try:
            fd = os.open(copy, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # of another user, or removed since
        _close(fd, copy)


def _close(fd: int, copy: Path) -> None:
    """Remove the copy unless another process uses it."""
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:
            copy.unlink(missing_ok=True)
    os.close(fd)


def _refused(source: Path, copy: Path, error: OSError) -> EnvironmentError_:
    return EnvironmentError_(
        f"{source} cannot be copied to {copy}: {error.strerror} (fix: mount {copy.parent} larger than the base, or set "
        "model.shared_memory=false)"
    )


class ModelFolder:
    """The tensors of a model folder by name, in pieces. ``files`` are its safetensors files or copies of them."""

    def __init__(self, path: str, files: Sequence[Path]) -> None:
        self.path = path
        self._files: dict[str, Any] = {}
        for file in files:
            opened: Any = safe_open(file, framework="pt")
            self._files |= dict.fromkeys(opened.keys(), opened)

    @classmethod
    def of(cls, model: ModelConfig) -> ModelFolder:
        """With ``model.shared_memory`` the node's copy, which this process then holds until it ends."""
        if not model.shared_memory:
            return cls.at(model.folder)
        return cls(model.folder, share(_files(model.folder), first=int(os.environ.get("LOCAL_RANK", "0"))))

    @classmethod
    def at(cls, path: str) -> ModelFolder:
        return cls(path, _files(path))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._slice(name)[start:stop]

    def columns(self, name: str, start: int, stop: int) -> Tensor:
        return self._slice(name)[:, start:stop]

    def whole(self, name: str) -> Tensor:
        return self._slice(name)[:]

    def _slice(self, name: str) -> Any:
        """Raises UnknownTensorError."""
        if name not in self._files:
            raise UnknownTensorError(f"model tensor {name} is in no safetensors file of the model folder")
        return self._files[name].get_slice(name)


def _files(path: str) -> list[Path]:
    return [Path(path) / file for file in weight_files(Path(path))]
