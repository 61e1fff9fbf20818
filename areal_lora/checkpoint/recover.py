"""Find the checkpoint that a run resumes from, or a kept version to export. Read-only, without torch.

The newest complete checkpoint decides. A checkpoint is complete if the checksum of its manifest matches and every
listed file exists with its size and checksum. Newer incomplete checkpoints are reported with the reason, and so is a
run that has steps and no checkpoint.

A kept version becomes a PEFT folder without the engine that trained it: checkpoints hold whole tensors by wire name,
and names that share a tensor follow from the sizes of the base model.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from areal_lora.checkpoint import state
from areal_lora.checkpoint.checkpoint_store import BROKEN_PREFIX, NEWEST_FILE, leftovers_in, version_folder, versions_in
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.recorded import adapter_conflict, adapter_named
from areal_lora.errors import CheckpointError, ConfigError
from areal_lora.families.shape import ModelShape, read_shape
from areal_lora.families.sites import pieces_of, sites_of, wire_names
from areal_lora.obs.metrics.reader import iter_metrics
from areal_lora.obs.metrics.records import EvalRecord, StepRecord
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterRef, AdapterSpec
from areal_lora.weight_sync.manifest import base_digest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenCheckpoint:
    """A checkpoint that cannot be used, or the path of a missing one."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeCheckpoint:
    path: Path
    manifest: state.Manifest

    @property
    def ref(self) -> AdapterRef:
        return AdapterRef(name=self.manifest.spec.name, version=self.manifest.version)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.manifest.files)

    def age_s(self) -> float:
        return max(0.0, time.time() - self.manifest.written_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterResume:
    """Resume plan of one adapter: from ``newest``, or from the start (None) if no checkpoint was ever written.

    ``broken`` are the newer checkpoints, newest first. ``leftovers`` are unfinished writes of processes that died.
    """

    adapter: str
    newest: WholeCheckpoint | None
    broken: tuple[BrokenCheckpoint, ...] = ()
    leftovers: tuple[Path, ...] = ()

    @property
    def ref(self) -> AdapterRef:
        return AdapterRef(name=self.adapter, version=self.newest.manifest.version if self.newest else 0)

    def lines(self) -> Iterator[str]:
        instead = f"{self.newest.path} is used instead" if self.newest else "there is no older one"
        for broken in self.broken:
            yield f"checkpoint {broken.path} cannot be used: {broken.reason}; {instead}"


def check_usable(plan: Iterable[AdapterResume]) -> None:
    """Raises CheckpointError if an adapter's checkpoints are all broken: a resume would silently restart it."""
    for each in plan:
        if each.newest is None and each.broken:
            raise CheckpointError(
                f"no checkpoint of {each.adapter!r} can be used: "
                + "; ".join(f"{b.path}: {b.reason}" for b in each.broken)
                + " (fix: restore one of them, or start over with --fresh)"
            )


def explain(run_folder: RunFolder, config: Config, *, base_is_here: bool = True) -> list[AdapterResume]:
    """The checkpoints that a start loads, in the order of the adapters, without any change on the disk.

    Reads the newest ones completely. The base model is compared with that of the checkpoints only if ``base_is_here``.
    Raises ConfigError if ``config`` describes another adapter or base model than a checkpoint.
    """
    known = {adapter.name for adapter in config.adapters}
    # Of a service, adapters that have left keep theirs.
    for folder in sorted(run_folder.checkpoints.glob("*")) if config.service is None else ():
        if folder.is_dir() and folder.name not in known and versions_in(folder):
            raise ConfigError(
                "adapters",
                f"{folder} holds checkpoints of {folder.name!r}, and no adapter has this name",
                "give the adapter its name back, choose another run.name, or start over with --fresh",
            )
    plan = [find(run_folder, adapter.name) for adapter in config.adapters]
    for index, (adapter, found) in enumerate(zip(config.adapters, plan, strict=True)):
        if found.newest is not None:
            check_compatible(found.newest, adapter, index, base_digest(config.model.folder) if base_is_here else None)
    return plan


def find(run_folder: RunFolder, adapter: str) -> AdapterResume:
    """Find the newest complete checkpoint of ``adapter``, and the newer broken ones."""
    root = run_folder.adapter_checkpoints(adapter)
    broken, newest = _vanished(root), None
    for version in reversed(versions_in(root)):
        path = version_folder(root, version)
        try:
            newest = WholeCheckpoint(path=path, manifest=verify(path, AdapterRef(name=adapter, version=version)))
            break
        except CheckpointError as e:
            broken.append(BrokenCheckpoint(path=path, reason=str(e)))
    if newest is None and not broken:  # version 0 is written before the first step
        steps = sum(isinstance(r, StepRecord) and r.adapter == adapter for r in iter_metrics(run_folder))
        reason = f"{run_folder.metrics.name} has {steps} steps of it and there is no checkpoint"
        broken = [BrokenCheckpoint(path=root, reason=reason)] if steps else []
    return AdapterResume(adapter=adapter, newest=newest, broken=tuple(broken), leftovers=tuple(leftovers_in(root)))


def check_present(run_folder: RunFolder, config: Config) -> None:
    """Raise CheckpointError if an adapter has taken steps and has no checkpoint. Cheap, unlike `explain`."""
    bare = [a.name for a in config.adapters if not versions_in(run_folder.adapter_checkpoints(a.name))]
    check_usable(find(run_folder, name) for name in bare)


def _vanished(root: Path) -> list[BrokenCheckpoint]:
    """Return the checkpoint that was written last, if its folder is missing."""
    try:
        version = int((root / NEWEST_FILE).read_text(encoding="ascii"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as e:
        reason = f"it does not name a version: {e}"
        return [BrokenCheckpoint(path=root / NEWEST_FILE, reason=reason)] if versions_in(root) else []
    if version <= max(versions_in(root), default=-1):
        return []
    return [BrokenCheckpoint(path=version_folder(root, version), reason="it was written and its folder is missing")]


def verify(folder: Path, ref: AdapterRef) -> state.Manifest:
    """Verify that a checkpoint of ``ref`` is complete, and return its manifest.

    Raises CheckpointError with the reason only, without the path.
    """
    try:
        manifest = state.read_manifest(folder)
        if (manifest.spec.name, manifest.version) != (ref.name, ref.version):
            raise CheckpointError(f"the manifest is of {manifest.spec.name}@v{manifest.version}")
        for entry in manifest.files:
            path = folder / entry.name
            size = path.stat().st_size
            if size != entry.nbytes:
                raise CheckpointError(f"{entry.name} is torn: {size} of {entry.nbytes} bytes")
            with path.open("rb", buffering=0) as file:
                found = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
            if found != entry.blake2b:
                raise CheckpointError(f"{entry.name} is damaged: its checksum differs")
    except FileNotFoundError as e:
        raise CheckpointError(f"{Path(e.filename).name} is missing") from e
    except OSError as e:
        raise CheckpointError(f"{e.filename}: {e.strerror}") from e
    return manifest


def check_compatible(found: WholeCheckpoint, adapter: AdapterConfig, index: int, base: str | None) -> None:
    """Raise ConfigError if ``found`` belongs to another adapter (see `adapter_conflict`) or base model than configured.

    ``base`` is the digest of the configured base model, None if it is unknown.
    """
    if error := adapter_conflict(found.manifest.spec, adapter, index, str(found.path)):
        raise error
    if base is not None and found.manifest.base_digest != base:
        raise ConfigError(
            "model.path",
            f"{found.path} was trained on another base model (digest {found.manifest.base_digest}, here {base})",
            "give the folder of that model, choose another run.name, or start over with --fresh",
        )


def tidy(plan: Iterable[AdapterResume], disk: state.Disk) -> None:
    """Remove leftovers, and rename broken checkpoints so that new ones can use their names.

    Raises OSError. Only one process may call this, while no other process writes.
    """
    for adapter in plan:
        for path in adapter.leftovers:
            disk.remove(path)
        for broken in adapter.broken:
            if broken.path.is_dir():
                aside = broken.path.with_name(BROKEN_PREFIX + broken.path.name)
                disk.remove(aside)
                disk.rename(broken.path, aside)


NEWEST, BEST, BASE = "newest", "best", "base"
_NUMBER = re.compile(r"v?(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Version(WholeCheckpoint):
    """One to export. ``aliases``: full name to the wire name of the same tensor."""

    aliases: dict[str, str]
    revision: str | None

    def tensors(self) -> dict[str, Tensor]:
        """All tensors in float32 on the host, under every name; names that share a tensor share its memory."""
        import torch

        weights = state.read_tensors(self.path, self.manifest)["weight"]
        tensors = {name: torch.from_numpy(values) for name, values in weights.items()}
        return tensors | {name: tensors[wire] for name, wire in self.aliases.items()}

    def export(self, folder: Path, *, base: str | None = None) -> None:
        """Write the PEFT folder, with ``base`` as the name of its base model; another base has no known revision.

        Raises AdapterError if it exists, OSError if it cannot be written.
        """
        from areal_lora.checkpoint.adapter_io import save_peft

        spec, revision = self.manifest.spec, self.revision
        if base not in (None, spec.base_model):
            spec, revision = replace(spec, base_model=base), None
        tensors = {name: tensor for name, tensor in self.tensors().items() if name not in self.aliases}
        save_peft(folder, spec, tensors, spec.base_model, self.aliases, revision=revision)


def pick_version(folder: RunFolder, config: Config, text: str = NEWEST, name: str | None = None) -> Version:
    """The version that ``text`` names: a number (`12`, `v12`), `newest` or `best`; of the adapter called ``name``.

    A run with one adapter needs no name. Raises ConfigError if there is no such adapter or version, CheckpointError if
    its checkpoint is damaged.
    """
    adapter = adapter_named(config, name)
    root = folder.adapter_checkpoints(adapter.name)
    present = versions_in(root)
    number = _chosen(folder, adapter, present, text)
    if number not in present:
        kept = ", ".join(f"v{version}" for version in present) or "none"
        raise ConfigError(f"--version {text}", f"{root} does not hold it", f"choose one of the kept versions: {kept}")
    path = version_folder(root, number)
    try:
        manifest = verify(path, AdapterRef(name=adapter.name, version=number))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error} (fix: choose another version)") from None
    return _version(config, path, manifest)


def saved_version(folder: RunFolder, config: Config, adapter: str, label: str) -> Version:
    """What a client saved of ``adapter`` under ``label``. Raises CheckpointError, without the path."""
    path = folder.saved_state(adapter, label)
    try:
        manifest = state.read_manifest(path)
    except OSError as error:
        raise CheckpointError(f"{state.MANIFEST_FILE}: {error.strerror}") from error
    ref = AdapterRef(name=manifest.spec.name, version=manifest.version)
    return _version(config, path, verify(path, ref))


def _version(config: Config, path: Path, manifest: state.Manifest) -> Version:
    aliases = aliases_of(read_shape(Path(config.model.folder)), manifest.spec)
    return Version(path=path, manifest=manifest, aliases=aliases, revision=config.model.commit)


def aliases_of(shape: ModelShape, spec: AdapterSpec) -> dict[str, str]:
    """Names of the adapter that share the tensor of another name, such as lora_A of q, k and v (contract C5)."""
    found: dict[str, str] = {}
    for key in sites_of(shape, spec.expert_layout):
        if key.covered(spec.target_modules):
            found |= wire_names(pieces_of(shape, key))[1]
    return found


def recorded_evaluations(folder: RunFolder) -> dict[str, dict[int, state.Evaluation]]:
    """The valid evaluations of the first set, by adapter and version. Reads all records of the run."""
    found: dict[str, dict[int, state.Evaluation]] = {}
    for r in iter_metrics(folder):
        if isinstance(r, EvalRecord) and r.order == 0:
            evaluation = state.Evaluation(accuracy=r.accuracy, reward_mean=r.reward_mean, measure=r.measure)
            found.setdefault(r.adapter, {})[r.version] = evaluation
    return found


def evaluations_of(
    manifest: state.Manifest, recorded: Mapping[str, Mapping[int, state.Evaluation]]
) -> dict[int, state.Evaluation]:
    """Evaluations of the versions up to that of a checkpoint, whose own one is requested after it is written."""
    own = recorded.get(manifest.spec.name, {})
    return {**manifest.evaluations, **{v: found for v, found in own.items() if v <= manifest.version}}


def _chosen(folder: RunFolder, adapter: AdapterConfig, present: list[int], text: str) -> int:
    if match := _NUMBER.fullmatch(text):
        return int(match[1])
    if text not in (NEWEST, BEST):
        reason = "the base has no adapter" if text == BASE else "it names no version"
        raise ConfigError(f"--version {text}", reason, f"give a number, {NEWEST} or {BEST}")
    newest = find(folder, adapter.name).newest
    if newest is None:
        reason = f"{folder.adapter_checkpoints(adapter.name)} holds no whole checkpoint"
        raise ConfigError(str(folder), reason, "let the run take a step first")
    if text == NEWEST:
        return newest.manifest.version
    found = evaluations_of(newest.manifest, recorded_evaluations(folder))
    best = state.best_version({version: found[version] for version in present if version in found})
    if best is None:
        raise ConfigError(f"--version {BEST}", "no kept version was evaluated", f"give a number, or {NEWEST}")
    return best
