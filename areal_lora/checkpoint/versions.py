"""Any kept version of a run's adapter as a PEFT folder, without the engine that trained it.

Checkpoints hold whole tensors by wire name, so nothing of the parallel layout is needed; names that share a tensor
follow from the sizes of the base model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from areal_lora.checkpoint.checkpoint_store import version_folder, versions_in
from areal_lora.checkpoint.recover import find, verify
from areal_lora.checkpoint.state import MANIFEST_FILE, Manifest, best_version, decode_manifest, files_of, read_files
from areal_lora.config.adapter_run import adapter_named
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.errors import CheckpointError, ConfigError
from areal_lora.families.shape import ModelShape, read_shape
from areal_lora.families.sites import pieces_of, sites_of, wire_names
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterRef, AdapterSpec

if TYPE_CHECKING:
    from torch import Tensor

NEWEST, BEST = "newest", "best"
_NUMBER = re.compile(r"v?(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version whose checkpoint is whole. ``aliases``: full name to the wire name of the same tensor."""

    ref: AdapterRef
    path: Path
    manifest: Manifest
    aliases: dict[str, str]
    base: str
    revision: str | None

    def tensors(self) -> dict[str, Tensor]:
        """All tensors in float32 on the host, under every name; names that share a tensor share its memory."""
        import torch

        weights = read_files([self.path / entry.name for entry in files_of(self.manifest)])["weight"]
        tensors = {name: torch.from_numpy(values) for name, values in weights.items()}
        return tensors | {name: tensors[wire] for name, wire in self.aliases.items()}

    def export(self, folder: Path, *, base: str | None = None) -> None:
        """Write the PEFT folder, with ``base`` as the name of its base model if that is given.

        Raises AdapterError if it exists, OSError if it cannot be written.
        """
        from areal_lora.checkpoint.adapter_io import save_peft

        spec = self.manifest.spec
        if base is not None:
            spec = replace(spec, base_model=base)
        tensors = {name: tensor for name, tensor in self.tensors().items() if name not in self.aliases}
        save_peft(folder, spec, tensors, base or self.base, self.aliases, revision=self.revision)


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
    ref, path = AdapterRef(name=adapter.name, version=number), version_folder(root, number)
    try:
        manifest = verify(path, ref)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error} (fix: choose another version)") from None
    shape = read_shape(Path(config.model.folder))
    return Version(
        ref=ref,
        path=path,
        manifest=manifest,
        aliases=aliases_of(shape, manifest.spec),
        base=manifest.spec.base_model,
        revision=config.model.commit,
    )


def saved_version(folder: RunFolder, config: Config, adapter: str, label: str) -> Version:
    """What a client saved of ``adapter`` under ``label``. Raises CheckpointError, without the path."""
    path = folder.saved_state(adapter, label)
    try:
        manifest = decode_manifest((path / MANIFEST_FILE).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{MANIFEST_FILE}: {error.strerror}") from error
    ref = AdapterRef(name=manifest.spec.name, version=manifest.version)
    return Version(
        ref=ref,
        path=path,
        manifest=verify(path, ref),
        aliases=aliases_of(read_shape(Path(config.model.folder)), manifest.spec),
        base=manifest.spec.base_model,
        revision=config.model.commit,
    )


def aliases_of(shape: ModelShape, spec: AdapterSpec) -> dict[str, str]:
    """Names of the adapter that share the tensor of another name, such as lora_A of q, k and v (contract C5)."""
    found: dict[str, str] = {}
    for key in sites_of(shape, spec.expert_layout):
        if key.covered(spec.target_modules):
            found |= wire_names(pieces_of(shape, key))[1]
    return found


def _chosen(folder: RunFolder, adapter: AdapterConfig, present: list[int], text: str) -> int:
    if match := _NUMBER.fullmatch(text):
        return int(match[1])
    if text not in (NEWEST, BEST):
        raise ConfigError(f"--version {text}", "it names no version", f"give a number, {NEWEST} or {BEST}")
    newest = find(folder, adapter.name).newest
    if newest is None:
        reason = f"{folder.adapter_checkpoints(adapter.name)} holds no whole checkpoint"
        raise ConfigError(str(folder), reason, "let the run take a step first")
    if text == NEWEST:
        return newest.manifest.version
    kept = {version: figures for version, figures in newest.manifest.evaluations.items() if version in present}
    best = best_version(kept)
    if best is None:
        raise ConfigError(f"--version {BEST}", "no kept version was evaluated", f"give a number, or {NEWEST}")
    return best
