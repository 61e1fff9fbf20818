"""Contents of a checkpoint as data: the tensors of each rank, and the manifest of all files.

Tensors are stored by wire name, so a checkpoint is independent of the trainer's parallel layout.
A rank's file is plain safetensors with the names ``<part>/<wire name>``; `PARTS` are the parts.
A checkpoint never contains the base model (contract C11): the manifest has its digest. This module imports no torch.
"""

import hashlib
import math
import mmap
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from areal_lora.errors import CheckpointError
from areal_lora.families.safetensors_head import head_of, read_head
from areal_lora.run_folder.paths import sync_folder
from areal_lora.types import AdapterSpec, Correction

FORMAT = 2
MANIFEST_FILE = "manifest.json"
WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
PARTS = (WEIGHT, *MOMENTS)
Named = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterState:
    """The part of an adapter's training state that one rank owns, copied to the host.

    ``parts`` has one flat fp32 array per name of `PARTS`, with the tensors of ``shapes`` (by wire name)
    concatenated in that order; a frozen adapter has its weights only. ``step`` counts the optimizer steps taken, for
    Adam's bias correction.
    """

    step: int
    shapes: Mapping[str, tuple[int, ...]]
    parts: Named


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    nbytes: int
    blake2b: str


class RankRandom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """States of torch's random number generators on one trainer rank; ``device`` is empty on CPU."""

    host: bytes
    device: bytes = b""


class Clock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Step count and settings of an adapter's optimizer; ``settings`` are the values of `OptimizerConfig`.

    ``step`` counts the optimizer steps taken, ``total_steps`` the training steps of the run; a training step has one
    or several optimizer steps. The learning rate depends on the version alone.
    """

    step: int
    total_steps: int
    lr: float
    settings: dict[str, float | str | list[float] | None]


class Companion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter that belongs to the checkpoint's adapter: a critic, or a frozen reference (``step`` 0)."""

    spec: AdapterSpec
    step: int


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out figures of one version. ``accuracy`` is None where the task has no rule for what is correct.

    ``measure``: that of the `EvalRecord`; unknown if empty.
    """

    accuracy: float | None
    reward_mean: float | None
    measure: str = ""


def best_version(evaluations: Mapping[int, Evaluation]) -> int | None:
    """Return the version with the highest accuracy; ties are broken by mean reward, then by the newest version.

    Only evaluations with the measure of the newest one are compared: those before a change of the set or the reward
    are not. If the newest has no accuracy (the task no longer has a rule for it), only mean rewards are compared.
    """
    if not evaluations:
        return None
    newest = evaluations[max(evaluations)]
    ruled = newest.accuracy is not None

    def rank(version: int) -> tuple[float, float, int]:
        found = evaluations[version]
        accuracy = found.accuracy if ruled else None
        return (
            -math.inf if accuracy is None else accuracy,
            -math.inf if found.reward_mean is None else found.reward_mean,
            version,
        )

    return max((v for v, found in evaluations.items() if found.measure in ("", newest.measure)), key=rank)


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of ``manifest.json`` for version ``version`` of one adapter.

    ``layout`` is the parallel layout of the writer, for information only. ``ledger`` is the controller's
    snapshot after the step that produced this version is consumed. ``evaluations`` are the known held-out
    evaluations by version, ``awaited`` the earlier versions with a pending evaluation. ``written_s`` is Unix time.
    ``kl_scale`` is the factor of the KL coefficient, ``correction`` the next step's (`TrainingState`). ``companions``
    are by role, which their files start with (`files_of`).
    """

    format: int = FORMAT
    run: str
    version: int
    spec: AdapterSpec
    base_digest: str
    layout: dict[str, int]
    clock: Clock
    files: tuple[FileEntry, ...]
    random: tuple[RankRandom, ...]
    ledger: bytes
    evaluations: dict[int, Evaluation]
    awaited: tuple[int, ...] = ()
    kl_scale: float = 1.0
    correction: Correction = Correction.TRUNCATE
    companions: dict[str, Companion] = {}
    written_s: float


def rank_file(rank: int, role: str = "") -> str:
    """The file of a rank's tensors: of the adapter itself, or of its companion in ``role``."""
    return f"{role}-rank-{rank:04d}.safetensors" if role else f"rank-{rank:04d}.safetensors"


def files_of(manifest: Manifest, role: str = "") -> list[FileEntry]:
    """The files of the adapter itself, or of its companion in ``role``."""
    prefix = f"{role}-rank-" if role else "rank-"
    return [entry for entry in manifest.files if entry.name.startswith(prefix)]


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest with its checksum, which detects damage to the manifest itself."""

    blake2b: str
    manifest: msgspec.Raw


def digest_of(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Envelope(digest_of(body), msgspec.Raw(body)))


def decode_manifest(data: bytes) -> Manifest:
    """Decode a manifest. Raises CheckpointError, without the path, for data that `encode_manifest` did not write."""
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        body = bytes(envelope.manifest)
        if digest_of(body) != envelope.blake2b:
            raise CheckpointError("the manifest is damaged: its checksum differs")
        found = msgspec.json.decode(body).get("format")
        if found != FORMAT:
            raise CheckpointError(f"the manifest has format {found}, this version reads {FORMAT}")
        return msgspec.json.decode(body, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise CheckpointError(f"the manifest cannot be read: {e}") from e


def read_manifest(folder: Path) -> Manifest:
    """That of the checkpoint or saved state in ``folder``. Raises OSError, and CheckpointError as `decode_manifest`."""
    return decode_manifest((folder / MANIFEST_FILE).read_bytes())


def read_tensors(folder: Path, manifest: Manifest, role: str = "") -> dict[str, dict[str, np.ndarray]]:
    """As `read_files`, of the adapter itself, or of its companion in ``role``."""
    return read_files([folder / entry.name for entry in files_of(manifest, role)])


def file_parts(state: AdapterState) -> list[bytes | memoryview]:
    """Return the content of a rank's file without copying the tensors: the header, then one buffer per part."""
    kept = [part for part in PARTS if part in state.parts]
    sizes = [(name, shape, 4 * math.prod(shape)) for name, shape in state.shapes.items()]
    head, _ = head_of((f"{part}/{name}", "F32", shape, size) for part in kept for name, shape, size in sizes)
    # memoryview cannot cast an empty array to bytes.
    flats = [state.parts[part] for part in kept if state.parts[part].size]
    return [head, *(f.data.cast("B") for f in flats)]


def read_files(paths: Sequence[Path]) -> dict[str, dict[str, np.ndarray]]:
    """Memory-map the tensors of all ranks' files: by part, then by wire name.

    Raises CheckpointError for a file that `file_parts` did not write, or a tensor in two files.
    """
    found: dict[str, dict[str, np.ndarray]] = {part: {} for part in PARTS}
    for path in paths:
        try:
            with path.open("rb") as file:
                entries, start, _ = read_head(file)
                # A private writable mapping: no code writes to it, but torch warns about read-only memory.
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            for key, entry in entries.items():
                part, _, name = key.partition("/")
                if name in found[part]:
                    raise CheckpointError(f"{path}: {key} is in another file, too")
                place = start + entry.data_offsets[0]
                flat = np.frombuffer(data, dtype=np.float32, count=entry.nbytes // 4, offset=place)
                found[part][name] = flat.reshape(entry.shape)
        except (ValueError, KeyError) as e:
            raise CheckpointError(f"{path} is not a file of a checkpoint: {e!r}") from e
    return found


CHUNK_BYTES = 8 << 20
SYNC_CHUNKS = 4
"""Chunks that a file system holds back at most: one sync of them all would hold up those of other files as long."""


class Disk:
    """Plain operations; all raise OSError. The tests' `FaultyDisk` is one whose n-th operation fails.

    ``about_to`` is called before each: ``mkdir``, ``open``, ``write`` (once per chunk), ``fsync``,
    ``rename``, ``remove``.
    """

    def about_to(self, operation: str, path: Path) -> None:
        """Nothing; for fakes."""

    def make_folder(self, path: Path) -> None:
        self.about_to("mkdir", path)
        path.mkdir()

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> FileEntry:
        """A new file that is on the disk when this returns, its entry in the folder aside (see ``fsync``)."""
        sum_, size = hashlib.blake2b(digest_size=16), 0
        self.about_to("open", path)
        with path.open("xb", buffering=0) as file:
            for part in parts:
                view = memoryview(part)
                for number, at in enumerate(range(0, len(view), CHUNK_BYTES), 1):
                    chunk = view[at : at + CHUNK_BYTES]
                    sum_.update(chunk)
                    self.about_to("write", path)
                    size += self._write_all(file.fileno(), chunk)
                    if number % SYNC_CHUNKS == 0:
                        os.fdatasync(file.fileno())
            self.about_to("fsync", path)
            os.fsync(file.fileno())
        return FileEntry(name=path.name, nbytes=size, blake2b=sum_.hexdigest())

    def fsync_folder(self, path: Path) -> None:
        """Make the names in ``path`` last."""
        self.about_to("fsync", path)
        sync_folder(path)

    def rename(self, path: Path, to: Path) -> None:
        self.about_to("rename", to)
        path.rename(to)

    def remove(self, path: Path) -> None:
        """A folder with all that is in it, or a file. What is missing already is no error."""
        self.about_to("remove", path)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def _write_all(self, fd: int, data: memoryview) -> int:
        done = 0
        while done < len(data):
            done += os.write(fd, data[done:])
        return done
