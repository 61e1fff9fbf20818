"""Endpoints and the run secret: small files through which the processes of a run find and trust each other.

Every process binds port 0 and publishes it as ``rendezvous/<role>-<index>.json``; others wait for that file. The run
secret is 32 random bytes in hex, in ``secret`` with mode 0600 (contract C12).
"""

import contextlib
import errno
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from areal_lora.errors import ConfigError, EnvironmentError_, ProcessFailed
from areal_lora.run_folder.paths import RunFolder, write_file

POLL_S = 0.05
REMIND_S = 10.0
LOADING_S = 6000.0  # of all servers of a run, at the same time
READ_TRIES, RETRY_S = 3, 0.02
"""A file that is replaced while it is read: ESTALE on NFS, where the name already leads to the new one."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Address and ports of one process: ``ports`` by plane, for example ``{"data": 1234, "admin": 1235}``.

    ``tls`` are the planes that speak TLS. A server has ``workers`` receivers, `rollout.tp` if None.
    """

    host: str
    ports: dict[str, int]
    pid: int
    tls: tuple[str, ...] = ()
    workers: int | None = None


_decode = msgspec.json.Decoder(Endpoint).decode  # made once: threads that do so together end the process


def publish_endpoint(
    run_folder: RunFolder,
    role: str,
    index: int,
    ports: Mapping[str, int],
    host: str = "127.0.0.1",
    tls: Iterable[str] = (),
    workers: int | None = None,
) -> None:
    """Publish, in place of an earlier file, which ports this process has bound on ``host``, which others dial."""
    if host in ("0.0.0.0", "::", ""):
        raise ConfigError("cluster.bind", f"no process can dial {host!r}", "publish an address of this machine")
    path = run_folder.endpoint(f"{role}-{index}")
    path.parent.mkdir(parents=True, exist_ok=True)
    endpoint = Endpoint(pid=os.getpid(), host=host, ports=dict(ports), tls=tuple(tls), workers=workers)
    write_file(path, msgspec.json.encode(endpoint))


def published_hosts(run_folder: RunFolder) -> list[str]:
    """Addresses that processes of the run have published so far, each once."""
    hosts: dict[str, None] = {}
    for file in sorted(run_folder.endpoints.glob("*.json")):
        with contextlib.suppress(FileNotFoundError):  # its process ended meanwhile
            hosts[_decode(file.read_bytes()).host] = None
    return list(hosts)


def published_files(run_folder: RunFolder, role: str) -> dict[int, tuple[int, int]]:
    """By index of a process of ``role`` that has published, the identity of its file, another one in each session."""
    files = dict[int, tuple[int, int]]()
    with contextlib.suppress(FileNotFoundError), os.scandir(run_folder.endpoints) as entries:
        for entry in entries:
            index = entry.name.removeprefix(f"{role}-").removesuffix(".json")
            if index.isdecimal() and entry.name == f"{role}-{index}.json":
                with contextlib.suppress(FileNotFoundError):  # its process ended meanwhile
                    status = entry.stat()
                    files[int(index)] = status.st_ino, status.st_mtime_ns
    return files


def read_endpoint(run_folder: RunFolder, role: str, index: int) -> Endpoint | None:
    """Endpoint of ``<role>-<index>``, or None before it has published.

    A file that is replaced while it is read is read again. Raises OSError where that does not help.
    """
    path = run_folder.endpoint(f"{role}-{index}")
    for tries_left in reversed(range(READ_TRIES)):
        try:
            return _decode(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
            if not tries_left:
                if isinstance(error, OSError):
                    raise
                raise OSError(errno.EIO, f"holds no endpoint: {error!r}", str(path)) from error
            time.sleep(RETRY_S)
    return None


def forget_endpoint(run_folder: RunFolder, role: str, index: int) -> None:
    """Remove the endpoint of an ended process, so that others wait for that of its next session."""
    run_folder.endpoint(f"{role}-{index}").unlink(missing_ok=True)


def wait_endpoint(
    run_folder: RunFolder,
    role: str,
    index: int,
    timeout_s: float,
    still_alive: Callable[[], bool] | None = None,
    loading: Callable[[], Collection[str]] = tuple,
) -> Endpoint:
    """Wait until ``<role>-<index>`` has published; reported on stderr every 10 s.

    Raises ProcessFailed at ``timeout_s``, later while it is among the processes that ``loading`` returns, or as soon as
    ``still_alive`` returns False. A file that cannot be read is waited for like one that is not there.
    """
    process = f"{role}-{index}"
    start = time.monotonic()
    remind_at, until = start + REMIND_S, start + timeout_s
    while True:
        problem = ""
        try:
            endpoint = read_endpoint(run_folder, role, index)
            if endpoint is not None:
                return endpoint
        except OSError as error:
            problem = f" ({error.filename}: {error.strerror})"
        now = time.monotonic()
        if still_alive is not None and not still_alive():
            raise ProcessFailed(f"{process} ended before it published its ports; see {run_folder.log(process)}")
        if now >= until and process not in loading():
            raise ProcessFailed(
                f"{process} did not publish its ports within {timeout_s:.0f} s{problem}; see {run_folder.log(process)}"
            )
        if now >= remind_at:
            remind_at = now + REMIND_S
            print(f"waiting for {process} since {now - start:.0f} s{problem}", file=sys.stderr, flush=True)
        time.sleep(POLL_S)


def wait_servers(
    run_folder: RunFolder, count: int, timeout_s: float, loading: Callable[[], Collection[str]] = tuple
) -> None:
    """Wait for the first ``count`` servers but abandoned ones, ``timeout_s`` or while one is ``loading`` its model.

    Raises ProcessFailed, also if none remains, or if one still loads after `LOADING_S`.
    """
    remaining, until = 0, time.monotonic() + LOADING_S

    def still_loading() -> Collection[str]:
        return loading() if time.monotonic() < until else ()

    for index in range(count):
        excluded = run_folder.excluded(f"server-{index}")
        try:
            wait_endpoint(run_folder, "server", index, timeout_s, lambda: not excluded.exists(), still_loading)  # noqa: B023
            remaining += 1
        except ProcessFailed:
            if not excluded.exists():
                raise
    if not remaining:
        raise ProcessFailed(f"none of {count} servers came up; see {run_folder.logs}")


def claim_indices(run_folder: RunFolder, n: int, first: int) -> list[int]:
    """Claim ``n`` server indices that no server of the run has had. Those below ``first`` are the run's own."""
    folder = run_folder.spares
    folder.mkdir(parents=True, exist_ok=True)
    used = [int(path.name.partition("-")[2]) for path in folder.glob("server-*")]
    index, claimed = max([first, *(i + 1 for i in used)]), list[int]()
    while len(claimed) < n:
        with contextlib.suppress(FileExistsError):  # another command claims, too
            (folder / f"server-{index}").open("x").close()
            claimed.append(index)
        index += 1
    return claimed


def create_secret(run_folder: RunFolder) -> None:
    """Write a fresh run secret, mode 0600, which locks out processes of a previous start."""
    write_file(run_folder.secret, secrets.token_hex(32), mode=0o600)


def read_secret(run_folder: RunFolder) -> str:
    """The run secret (64 hex digits). Raises EnvironmentError_ where the file is missing or readable by others."""
    path = run_folder.secret
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        raise EnvironmentError_(f"{path}: no run secret (fix: start the run with areal_lora.launch)") from None
    if mode & 0o077:
        raise EnvironmentError_(f"{path}: run secret is readable by others, mode {mode:04o} (fix: chmod 600 it)")
    return path.read_text(encoding="ascii").strip()
