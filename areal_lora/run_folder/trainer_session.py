"""The number of the trainer's session, raised at each of its starts.

Versions are numbered by steps. A trainer that ends with versions that servers hold and no checkpoint has makes other
versions of the same numbers in its next session: the session is the difference.
"""

from areal_lora.errors import CheckpointError
from areal_lora.run_folder.atomic import write_file
from areal_lora.run_folder.paths import RunFolder


def raise_session(run_folder: RunFolder) -> int:
    """The next number, from 1, once it is durable. Raises CheckpointError for a file that cannot be read or written."""
    path, last = run_folder.trainer_session, 0
    try:
        if path.exists():
            last = int(path.read_text(encoding="ascii"))
        write_file(path, f"{last + 1}\n", durable=True)
    except ValueError as e:
        fix = "remove it, then start trainer and rollout servers, which refuse a lower number than they have seen"
        raise CheckpointError(f"{path}: {e} (fix: {fix})") from e
    except OSError as e:
        raise CheckpointError(f"{path}: {e.strerror} (fix: make the run folder writable)") from e
    return last + 1
