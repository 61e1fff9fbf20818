"""The number of the trainer's session, raised at each of its starts.

Versions of an adapter are numbered by their steps. A trainer that ends with versions that no checkpoint has, and that
servers hold, makes other versions of the same numbers in its next session: the number of the session is the difference.
"""

from contextlib import suppress

from areal_lora.errors import CheckpointError
from areal_lora.run_folder.atomic import write_file
from areal_lora.run_folder.paths import RunFolder


def raise_session(run_folder: RunFolder) -> int:
    """The next number, from 1; durable when this returns. Call it once, on rank 0.

    Raises CheckpointError for a file that holds no number or cannot be written.
    """
    path, last = run_folder.trainer_session, 0
    try:
        with suppress(FileNotFoundError):
            last = int(path.read_text(encoding="ascii"))
        write_file(path, f"{last + 1}\n", durable=True)
    except ValueError as e:
        raise CheckpointError(
            f"{path}: {e} (fix: remove it while no process of the run is alive; rollout servers refuse a number below "
            "one that they have seen)"
        ) from e
    except OSError as e:
        raise CheckpointError(f"{path}: {e.strerror}; the run folder must be writable") from e
    return last + 1
