"""Files that are written whole or not at all: a reader sees the previous content or the new one."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from areal_lora.errors import undo_on_error


def write_file(path: Path, content: str | bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """Write ``content`` (text as UTF-8) in one step; see `replacing`. Raises OSError that names ``path``."""
    try:
        with replacing(path, mode=mode, durable=durable) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:  # that of a write names no file, others the temporary one
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def replacing(path: Path, *, mode: int = 0o666, durable: bool = False) -> Iterator[BinaryIO]:
    """A new file beside ``path`` that replaces it at the end of the block, or is removed if the block raises.

    ``mode`` is that of a new file, which the umask restricts. ``durable``: content and name survive a loss of power
    that comes after the block. Hosts, processes and threads may write one file at the same time: the last one wins.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{threading.get_ident():x}.tmp")
    temporary.unlink(missing_ok=True)  # of a process that was killed and had the same id
    with undo_on_error(partial(temporary.unlink, missing_ok=True)):
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    if durable:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in ``path`` survive a loss of power. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
