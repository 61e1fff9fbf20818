"""What clients save of their adapters, ``RUN/states/ADAPTER/LABEL``: folders like those of checkpoints, in no order.

They outlive the adapter. Weights, moments and clock are in one, so that whoever loads it chooses. One is written beside
its place and then takes it, so that a crash leaves hidden folders; the next start removes them (`tidy_states`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from areal_lora.checkpoint.checkpoint_store import leftovers_in, looks_whole
from areal_lora.checkpoint.files import Disk
from areal_lora.checkpoint.recover import verify
from areal_lora.checkpoint.state import MANIFEST_FILE, Manifest, decode_manifest, files_of, read_files
from areal_lora.distributed.exchange import Exchange, first_problem
from areal_lora.engine.base import TrainEngine
from areal_lora.errors import CheckpointError
from areal_lora.operations.protocol import LoadState, OperationFailure, StateResult
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.adapter import Adapter
from areal_lora.types import AdapterRef

LEFTOVER = re.compile(r"\.(.+)\.[0-9a-f]{8}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def named(*names: str) -> str:
    """Why these are no names of an adapter and of a label; empty if they are."""
    wrong = next((name for name in names if not NAME.fullmatch(name)), None)
    return "" if wrong is None else f"{wrong[:128]!r} is no name: up to 128 letters, digits, ., _ and -"


def loadable(run_folder: RunFolder, request: LoadState, adapter: Adapter, base: str) -> str:
    """Why ``adapter`` on the base with the digest ``base`` cannot become what was saved; empty if it can."""
    if wrong := named(request.adapter, request.label):
        return wrong
    folder = run_folder.saved_state(request.adapter, request.label)
    try:
        saved = _manifest(folder)
        verify(folder, AdapterRef(name=saved.spec.name, version=saved.version))
    except FileNotFoundError:
        return f"{request.adapter} has no saved state {request.label!r}"
    except (OSError, CheckpointError) as error:
        return f"the saved state {request.label!r} of {request.adapter} cannot be read: {error}"
    if saved.spec.bare() != adapter.spec.bare():
        return f"the saved state {request.label!r} is of an adapter with another rank, alpha or other modules"
    return "" if saved.base_digest == base else f"the saved state {request.label!r} is of another base model"


def load_saved(
    engine: TrainEngine, run_folder: RunFolder, request: LoadState, adapter: str, exchange: Exchange
) -> StateResult | OperationFailure:
    """Set the adapter to a state that is `loadable`. Without the optimizer its moments and its clock start again.

    Collective. Failed, and the adapter is as it was, if a rank cannot read it: a shared file system may show rank 0
    a folder before the others.
    """
    folder = run_folder.saved_state(request.adapter, request.label)
    problem = ""
    try:
        saved = _manifest(folder)
        entries = files_of(saved)
        parts = read_files([folder / entry.name for entry in entries])
    except (OSError, CheckpointError) as error:
        problem = f"trainer rank {exchange.rank} cannot read the saved state {request.label!r}: {error}"
    if problem := first_problem(problem, exchange):
        return OperationFailure(reason=f"{problem} (fix: load it again)", by_client=False)
    step = saved.clock.step if request.optimizer else 0
    if not request.optimizer:
        empty = {name: np.zeros_like(values) for name, values in parts["weight"].items()}
        parts = {part: values if part == "weight" else empty for part, values in parts.items()}
    engine.load_state(adapter, parts, step)
    return StateResult(step=step, n_bytes=sum(entry.nbytes for entry in entries))


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A folder that a crash left beside saved states; ``completes`` is the place of a state that it is all of."""

    path: Path
    completes: Path | None = None


def leftovers(run_folder: RunFolder) -> list[Leftover]:
    """What crashes left of states that were being saved. Reads manifests and sizes only.

    A state that takes the place of another one moves that aside first. After a crash between the two both are whole
    and hidden, and one of them takes the place again: the save had no answer, and is requested again.
    """
    found: list[Leftover] = []
    for path in [path for root in sorted(run_folder.saved_states.glob("*")) for path in leftovers_in(root)]:
        match = LEFTOVER.fullmatch(path.name)
        place = path.with_name(match[1]) if match else None
        lacking = place is not None and not looks_whole(place) and place not in [each.completes for each in found]
        found.append(Leftover(path=path, completes=place if lacking and looks_whole(path) else None))
    return found


def tidy_states(run_folder: RunFolder, disk: Disk) -> None:
    """Remove leftovers, but a whole one takes its place where there is none.

    Only while no process saves. Raises CheckpointError.
    """
    try:
        for leftover in leftovers(run_folder):
            if leftover.completes is None:
                disk.remove(leftover.path)
            else:
                disk.remove(leftover.completes)
                disk.rename(leftover.path, leftover.completes)
                disk.fsync_folder(leftover.path.parent)
    except OSError as error:
        fix = "make the folder of saved states writable, then start the run again"
        raise CheckpointError(f"{error.filename}: {error.strerror} (fix: {fix})") from error


def _manifest(folder: Path) -> Manifest:
    return decode_manifest((folder / MANIFEST_FILE).read_bytes())
