"""Requeues in a row without a new checkpoint, counted over the job's lifetimes. Pure, but for the record's file."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from areal_lora.run_folder.atomic import write_file
from areal_lora.run_folder.paths import RunFolder


class Lifetime(msgspec.Struct, frozen=True, kw_only=True):
    """From one start of the batch script to the next.

    ``newest`` are the newest checkpoints at its start, by adapter. ``without``: requeues up to this one without a new
    checkpoint. ``reason`` is why it was requeued, as far as the job itself decided that.
    """

    job: str
    restarts: int
    newest: dict[str, int]
    without: int = 0
    reason: str = ""

    def requeued(self, reason: str) -> Lifetime:
        """This one, with the reason why it ends."""
        return msgspec.structs.replace(self, reason=reason)

    def next_without(self, newest: Mapping[str, int]) -> int:
        """What the next lifetime counts, with these checkpoints at the end of this one."""
        progress = any(version > self.newest.get(name, -1) for name, version in newest.items())
        return 0 if progress else self.without + 1


def next_lifetime(last: Lifetime | None, job: str, restarts: int, newest: Mapping[str, int]) -> Lifetime:
    """The lifetime that starts now. A job that was submitted again counts from the start."""
    again = last is not None and last.job == job and restarts > last.restarts
    without = last.next_without(newest) if last is not None and again else 0
    return Lifetime(job=job, restarts=restarts, newest=dict(newest), without=without)


def too_many(without: int, most: int) -> str:
    """Why there is no further requeue; empty if there may be one."""
    if without <= most:
        return ""
    times = f"{without} times" if without > 1 else "once"
    return (
        f"the job would be requeued {times} in a row without a new checkpoint "
        f"(run.max_restarts is {most}; fix: see the reasons above, or raise the time limit)"
    )


def read_lifetime(run_folder: RunFolder) -> Lifetime | None:
    """The last one; None where there is none, or none that can be read."""
    try:
        return msgspec.json.decode(run_folder.job_requeues.read_bytes(), type=Lifetime)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def write_lifetime(run_folder: RunFolder, lifetime: Lifetime) -> None:
    write_file(run_folder.job_requeues, msgspec.json.encode(lifetime) + b"\n")
