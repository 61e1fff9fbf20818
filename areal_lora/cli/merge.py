"""``areal-lora merge RUN|ADAPTER OUT``: base and adapter as one model folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from areal_lora.cli.runs import ADAPTER_HELP, VERSION_HELP, find_run, recorded_config
from areal_lora.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from areal_lora.types import AdapterSpec

KEEP = "base"
TYPES = ("float32", "bfloat16", "float16")


def merge(
    source: Annotated[str, typer.Argument(metavar="RUN|ADAPTER", help="run folder or name, or a PEFT LoRA folder")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="folder to make; it must not exist")],
    version: Annotated[str, typer.Option(metavar="N", help=f"of a run: {VERSION_HELP}")] = "newest",
    adapter: Annotated[str | None, typer.Option(metavar="NAME", help=f"of a run: {ADAPTER_HELP}")] = None,
    base: Annotated[str, typer.Option(metavar="FOLDER", help="model folder, if it is not where the adapter says")] = "",
    dtype: Annotated[str, typer.Option(metavar="TYPE", help=f"type of the weights: {KEEP}, {', '.join(TYPES)}")] = KEEP,
) -> None:
    """Write the base model with the adapter added as a Hugging Face folder. The base is not changed.

    Sums are computed in float32. What bfloat16 loses of the adapter is printed.
    """
    if dtype not in (KEEP, *TYPES):
        raise ConfigError(f"--dtype {dtype}", "it is no type of weights", f"give {KEEP}, {', '.join(TYPES)}")
    import torch

    from areal_lora.checkpoint.merged_folder import write_merged

    name, folder, tensors, spec = _adapter(source, version, adapter, base)
    made = write_merged(folder, tensors, spec.scale_of, out, dtype=None if dtype == KEEP else getattr(torch, dtype))
    loss = made.bfloat16
    size = f"{made.weights} weights, {made.nbytes / 2**20:.1f} MiB"
    print(f"{name} and the base {folder} are merged in {out.absolute()}: {size}; the base is not changed")
    print(
        f"in bfloat16 {loss.survives:.1%} of the adapter survives: relative error {loss.error:.3f}, "
        f"{loss.unmoved:.1%} of the adapted elements equal the base's"
    )


def _adapter(
    source: str, version: str, adapter: str | None, base: str
) -> tuple[str, Path, dict[str, Tensor], AdapterSpec]:
    """Name, model folder, tensors under all names and specification."""
    from areal_lora.checkpoint.adapter_io import load_peft
    from areal_lora.checkpoint.versions import pick_version
    from areal_lora.families.peft_folder import CONFIG_FILE

    path = Path(source).expanduser()
    if (path / CONFIG_FILE).is_file():
        spec, tensors = load_peft(path)
        return path.name, _model_folder(base or spec.base_model), tensors, spec
    folder = find_run(source)
    config = recorded_config(folder)
    chosen = pick_version(folder, config, version, adapter)
    spec = chosen.manifest.spec
    return str(chosen.ref), _model_folder(base or config.model.folder), chosen.tensors(), spec


def _model_folder(text: str) -> Path:
    """A folder, or the cached snapshot of a hub name."""
    from areal_lora.config.snapshot import cached_snapshot
    from areal_lora.families.published import is_hub_name

    path = Path(text).expanduser()
    if path.is_dir():
        return path
    cached = cached_snapshot(text, None) if is_hub_name(text) else None
    if cached is None:
        raise ConfigError(text or "the adapter", "its base model is not on this machine", "name it with --base FOLDER")
    return cached
