"""The desired state: which adapters a run is to have beside those of its configuration, in ``RUN/desired.json``.

One process writes the file, a service or a script. Trainer rank 0 reads it between steps and while it waits, and takes
one step after another towards it: whoever is killed at any moment reads the same file again. What the run has is in the
``state`` records of ``metrics.jsonl``, under the `DesiredAdapter.key` of each adapter.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import msgspec

from areal_lora.errors import ConfigError
from areal_lora.processes.log import get_logger
from areal_lora.run_folder.paths import RunFolder, write_file

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")

log = get_logger(__name__)


class DesiredPhase(StrEnum):
    """``active``: it trains until its last step. ``paused``: it stays, and takes no steps. ``deleted``: it leaves."""

    ACTIVE = "active"
    PAUSED = "paused"
    DELETED = "deleted"


class DesiredAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One adapter. A deleted one may also be left out.

    ``incarnation`` distinguishes it from earlier bearers of its name, and never returns for a name: one that is used
    again meets neither versions nor checkpoints of its former bearer. ``adapter`` is its section of the configuration
    as data, without ``name``. It is fixed: other settings are another incarnation.
    """

    name: str
    incarnation: int
    phase: DesiredPhase = DesiredPhase.ACTIVE
    adapter: dict[str, Any]

    @property
    def key(self) -> str:
        """What the run calls it, in records, versions, checkpoints and on servers: ``name.incarnation``."""
        return f"{self.name}.{self.incarnation}"


class DesiredAdapters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapters, the first that is to join first. ``generation`` grows with every change.

    ``closed``: no further adapter will come, so the run ends when all adapters have made their steps.
    """

    generation: int = 0
    adapters: tuple[DesiredAdapter, ...] = ()
    closed: bool = False


class DesiredWatch:
    """Reads the file of one run again whenever it has been replaced. A look costs one ``stat``.

    A file that is no desired state is logged, and the one before it counts on.
    """

    def __init__(self, run_folder: RunFolder) -> None:
        self._run_folder = run_folder
        self._seen: tuple[int, int, int] | None = None
        self.newest = DesiredAdapters()
        """What was read last."""

    def look(self) -> DesiredAdapters:
        """The newest desired state; an empty one before the first."""
        try:
            now = os.stat(self._run_folder.desired)
        except FileNotFoundError:
            return self.newest
        mark = (now.st_ino, now.st_mtime_ns, now.st_size)
        if mark != self._seen:
            self._seen = mark
            try:
                self.newest = read_desired(self._run_folder)
            except ConfigError as error:
                log.error("the desired state is ignored: %s", error)
        return self.newest


def read_desired(run_folder: RunFolder) -> DesiredAdapters:
    """The desired state of the run; an empty one where there is none. Raises ConfigError for a file that is none."""
    path = run_folder.desired
    try:
        desired = msgspec.json.decode(path.read_bytes(), type=DesiredAdapters)
    except FileNotFoundError:
        return DesiredAdapters()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"it is no desired state: {error}", "write it with write_desired") from None
    if fault := next(_faults(desired), None):
        raise ConfigError(str(path), fault, "correct it with write_desired")
    return desired


def write_desired(run_folder: RunFolder, desired: DesiredAdapters) -> None:
    """Replace the desired state; it is on the disk, mode 0600, when this returns. One process may write.

    Raises ConfigError for a name or an incarnation that cannot be, a generation that does not grow, and a change of
    the settings of an adapter.
    """
    path, before = run_folder.desired, read_desired(run_folder)
    if fault := next(_faults(desired), None) or next(_broken_promises(before, desired), None):
        raise ConfigError(str(path), fault, "correct the desired state")
    path.parent.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(desired), indent=1) + b"\n"
    write_file(path, content, mode=0o600, durable=True)


def _faults(desired: DesiredAdapters) -> Iterator[str]:
    for adapter in desired.adapters:
        if not NAME.fullmatch(adapter.name):
            yield f"{adapter.name!r} is no name: up to 64 of a-z, 0-9, _ and -, the first a letter or a digit"
        if adapter.incarnation < 1:
            yield f"incarnation {adapter.incarnation} of {adapter.name!r} is below 1"
        if "name" in adapter.adapter:
            yield f"the settings of {adapter.name!r} have a name of their own"
    for key, count in Counter(adapter.key for adapter in desired.adapters).items():
        if count > 1:
            yield f"{key} is there {count} times"
    for name, count in Counter(a.name for a in desired.adapters if a.phase is not DesiredPhase.DELETED).items():
        if count > 1:
            yield f"{count} adapters are named {name!r}"


def _broken_promises(before: DesiredAdapters, now: DesiredAdapters) -> Iterator[str]:
    if now.generation <= before.generation:
        yield f"generation {now.generation} does not follow {before.generation}"
    was = {adapter.key: adapter for adapter in before.adapters}
    for adapter in now.adapters:
        if adapter.key in was and was[adapter.key].adapter != adapter.adapter:
            yield f"the settings of {adapter.key} changed: another incarnation may have others"
        if adapter.key in was and was[adapter.key].phase is DesiredPhase.DELETED and adapter.phase != "deleted":
            yield f"{adapter.key} was deleted: another incarnation may take the name"
