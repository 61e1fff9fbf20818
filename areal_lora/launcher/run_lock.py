"""One launcher a run folder, also on file systems without flock.

A file beside the run folder is locked with flock. Some network file systems have none (Lustre without ``-o flock``:
ENOSYS). There a second file names the owner of the folder: host, boot, process and start time of that process. It is
created exclusively. A file that a dead process of this host has left is replaced. One of another host is respected:
whether its process is alive cannot be seen from here.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
from pathlib import Path
from typing import Self

import msgspec

from areal_lora.errors import ConfigError
from areal_lora.processes.log import get_logger
from areal_lora.run_folder.paths import RunFolder

NO_FLOCK = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")

log = get_logger(__name__)


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """A process, so that no other one is taken for it: not after a reboot, not in another container."""

    host: str
    boot: str
    namespace: str
    pid: int
    started: int

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decoded(cls, text: bytes) -> Self:
        return msgspec.json.decode(text, type=cls)

    @classmethod
    def me(cls) -> Self:
        return cls(
            host=socket.gethostname(),
            boot=BOOT_ID.read_text(encoding="ascii").strip(),
            namespace=os.readlink(PID_NAMESPACE),
            pid=os.getpid(),
            started=_started(os.getpid()) or 0,
        )

    def is_over(self) -> bool:
        """True only where that is certain, as seen from this process."""
        here = Owner.me()
        if self.host != here.host:
            return False
        if self.boot != here.boot:
            return True
        if self.namespace != here.namespace:
            return False
        return _started(self.pid) != self.started


def _started(pid: int) -> int | None:
    """When ``pid`` started, in clock ticks since the boot; None where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Its second field is a name in parentheses that may hold anything; this is the 22nd.
    return int(stat.rpartition(")")[2].split()[19])


def is_locked(run_folder: RunFolder, locks: Path = Path("/proc/locks")) -> bool:
    """Whether a launcher of this host uses ``run_folder``. Takes no lock, which a launcher that starts would meet."""
    try:
        owner = msgspec.json.decode(run_folder.owner.read_bytes(), type=Owner)
        return not owner.is_over()
    except (FileNotFoundError, msgspec.DecodeError):
        pass
    try:
        inode = run_folder.lock.stat().st_ino
    except FileNotFoundError:
        return False
    # 1: FLOCK  ADVISORY  WRITE 707 fe:00:263171 0 EOF
    rows = [line.split() for line in locks.read_text(encoding="ascii").splitlines()]
    return any("FLOCK" in row and row[5].rpartition(":")[2] == str(inode) for row in rows if len(row) > 5)


class RunLock:
    """Held from :meth:`take` to :meth:`release`, or until the process ends."""

    def __init__(self, run_folder: RunFolder) -> None:
        self._folder = run_folder
        self._path = run_folder.lock
        self.owner_path = run_folder.owner
        self._fd = -1
        self._mine = False

    def take(self) -> None:
        """Raises ConfigError where another launcher holds the folder, or may hold it."""
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._take()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        if self._mine:
            self.owner_path.unlink(missing_ok=True)
            self._mine = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._going("") from None
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise ConfigError("run.root", f"{self._path} cannot be locked: {error.strerror}") from error
            log.warning(
                "the file system of %s has no flock (%s): %s marks the run as started here instead",
                self._path.parent,
                error.strerror,
                self.owner_path.name,
            )
        else:
            return
        with _one_at_a_time(self.owner_path):
            if (other := self._owner()) is not None:
                if not other.is_over():
                    raise self._going(f", started by process {other.pid} on {other.host}", self.owner_path)
                self.owner_path.unlink()
            self._create()

    def _owner(self) -> Owner | None:
        try:
            return msgspec.json.decode(self.owner_path.read_bytes(), type=Owner)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            raise self._going(", according to a mark that cannot be read", self.owner_path) from None

    def _create(self) -> None:
        try:
            with self.owner_path.open("xb") as file:
                self._mine = True
                file.write(msgspec.json.encode(Owner.me()))
        except FileExistsError:
            raise self._going(", started a moment ago", self.owner_path) from None

    def _going(self, holder: str, mark: Path | None = None) -> ConfigError:
        fix = "wait for it, or set another run.name"
        if mark is not None:
            fix += f", or remove {mark} if that process is over"
        return ConfigError("run.name", f"a run in {self._folder} is still going{holder}", fix)


def _one_at_a_time(path: Path) -> socket.socket:
    """A context that only one process of this host is in, for ``path``: else two would replace one stale mark.

    The name exists in the kernel: it needs no file system, and disappears with its process.
    """
    gate = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()
    try:
        gate.bind(f"\0areal_lora.{name}")
    except OSError:
        gate.close()
        raise ConfigError("run.name", "another launcher is starting in the same folder", "start again") from None
    return gate
