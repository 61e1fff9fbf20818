"""Restart the rollout servers of a run in turn while the others serve (``areal-lora restart-servers``).

    command --- request ---> launcher of the run: `Turns.step` --- leave ---> server: leaves in order, ends well
       `------ progress <--------'      `- published again, joined: the next one     `- restarted by its own launcher

The files are of the session: where the run itself starts again, all its servers have. A server that was added restarts
by the launcher that added it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from areal_lora.config.models import Config
from areal_lora.errors import ConfigError
from areal_lora.launcher.plan import SERVER
from areal_lora.obs.console import LiveConsole
from areal_lora.run_folder.paths import RunFolder, write_file
from areal_lora.run_folder.rendezvous import published_files, read_endpoint
from areal_lora.run_folder.status import LoadingServers

Record = TypeVar("Record", bound=msgspec.Struct)
ONE_BY_ONE, PART = 8, 8
BACK_S = 300.0
"""A server that neither loads its model nor serves for so long is not waited for."""
SHOWN = 4


class RestartRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``at_once`` servers may be away together; 0: `away_at_once` decides."""

    id: str
    at_once: int


class RestartProgress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Servers by name: ``now`` with what each waits for, ``failed`` with the reason."""

    id: str
    waiting: list[str]
    now: dict[str, str]
    done: list[str]
    failed: dict[str, str]

    @property
    def ended(self) -> bool:
        return not self.waiting and not self.now

    def __str__(self) -> str:
        total = sum(map(len, (self.waiting, self.now, self.done, self.failed)))
        parts = [f"{len(self.done)} of {total} servers restarted"]
        parts += [f"error: {name} does not return: {why}" for name, why in self.failed.items()]
        parts += [f"{name}: {what}" for name, what in list(self.now.items())[:SHOWN]]
        return "; ".join(parts) + (f"; {len(self.now) - SHOWN} more" if len(self.now) > SHOWN else "")


def away_at_once(servers: int, requested: int, min_servers: int) -> int:
    """Servers that may be away together: ``requested``, or by default one of up to 8 and an eighth of more.

    ``min_servers`` remain where there are more.
    """
    wanted = requested or (1 if servers <= ONE_BY_ONE else servers // PART)
    return min(wanted, max(1, servers - min_servers))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersSeen:
    """Facts by name of a server: identity of its published file, how often it joined; which load, were abandoned."""

    published: Mapping[str, tuple[int, int]]
    joins: Mapping[str, int]
    loading: Collection[str] = ()
    abandoned: Collection[str] = ()


@dataclass(slots=True)
class _Turn:
    was: tuple[int, int] | None
    joins: int
    alive: float
    what: str


class Turns:
    """Which server restarts when. Pure: time and facts are passed in."""

    def __init__(self, order: Sequence[str], at_once: int) -> None:
        self._waiting, self._at_once = list(order), at_once
        self._now: dict[str, _Turn] = {}
        self._done: list[str] = []
        self._failed: dict[str, str] = {}

    def step(self, seen: ServersSeen, now: float) -> list[str]:
        """Settle the turns that are over; returns the servers that are to leave and have not left."""
        for name, turn in list(self._now.items()):
            published = seen.published.get(name)
            if published is not None or name in seen.loading:
                turn.alive = now
            if published not in (None, turn.was) and seen.joins.get(name, 0) > turn.joins:
                self._done.append(name)
            elif name in seen.abandoned:
                self._failed[name] = "it left, and its launcher does not restart it"
            elif now - turn.alive > BACK_S:
                self._failed[name] = f"it has neither loaded nor served for {BACK_S:g} s"
            else:
                turn.what = "leaves in order" if published else "loads" if name in seen.loading else "starts"
                if published not in (None, turn.was):
                    turn.what = "joins with the next publish"
                continue
            del self._now[name]
        due = self._waiting[: max(0, self._at_once - len(self._now))]
        del self._waiting[: len(due)]
        for name in due:
            was = seen.published.get(name)
            self._now[name] = _Turn(was, seen.joins.get(name, 0), now, "leaves in order" if was else "starts")
        return [name for name, turn in self._now.items() if turn.was and seen.published.get(name) == turn.was]

    def progress(self, request: str) -> RestartProgress:
        now = {name: turn.what for name, turn in self._now.items()}
        return RestartProgress(
            id=request, waiting=list(self._waiting), now=now, done=list(self._done), failed=dict(self._failed)
        )


class RollingRestart:
    """Carries out requests, one after the other, as the launcher of the run looks."""

    def __init__(self, config: Config, run_folder: RunFolder, view: LiveConsole) -> None:
        self._folder, self._view, self._min_servers = run_folder, view, config.cluster.min_servers
        self._loading = LoadingServers(run_folder)
        self._turns: Turns | None = None
        self._progress: RestartProgress | None = None
        self._id = self._problem = ""

    def look(self, now: float) -> None:
        """Take one step; without a request that is one failed opening of a file. A problem is printed once in a row."""
        problem = ""
        try:
            self._step(now)
        except (ConfigError, OSError) as error:
            problem = str(error)
            if problem != self._problem:
                self._view.note(f"servers do not restart in turn: {problem}")
        self._problem = problem

    def _step(self, now: float) -> None:
        if self._turns is None and (request := read_record(self._folder.restart_request, RestartRequest)) is not None:
            endpoints = {i: read_endpoint(self._folder, SERVER, i) for i in published_files(self._folder, SERVER)}
            # Those elsewhere, of which the gateway states the workers, are restarted there.
            order = [f"{SERVER}-{i}" for i, e in sorted(endpoints.items()) if e is not None and e.workers is None]
            at_once = away_at_once(len(order), request.at_once, self._min_servers)
            self._turns, self._id = Turns(order, at_once), request.id
            self._view.note(f"{len(order)} servers restart in turn, {at_once} at once")
        if self._turns is None:
            return
        for name in self._turns.step(self._seen(), now):
            endpoint = read_endpoint(self._folder, SERVER, int(name.rpartition("-")[2]))
            if endpoint is not None and not (leave := self._folder.leaves / name).exists():
                write_file(leave, f"{endpoint.pid}\n")
        if (after := self._turns.progress(self._id)) == self._progress:
            return
        self._progress = after
        write_file(self._folder.restart_progress, msgspec.json.encode(after))
        self._folder.restart_request.unlink(missing_ok=True)
        if after.ended:
            self._view.note(str(after))
            self._turns = None

    def _seen(self) -> ServersSeen:
        published = {f"{SERVER}-{i}": file for i, file in published_files(self._folder, SERVER).items()}
        away = self._progress.now if self._progress is not None else ()
        abandoned = [name for name in away if self._folder.excluded(name).exists()]
        joins = {name: self._view.view.joins[name] + self._view.view.resumes for name in published}
        return ServersSeen(published=published, joins=joins, loading=self._loading.names(), abandoned=abandoned)


def read_record(path: Path, kind: type[Record]) -> Record | None:
    """What is in ``path``; None without the file. Raises ConfigError for a file of other content."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ConfigError(str(path), str(error), "remove it") from None
