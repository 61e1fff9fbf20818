"""Verbs that write, show or send a result: `export`, `merge`, `push`, `report`, `page`, `schema` and `track`."""

from __future__ import annotations

import json
import os
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError

from areal_lora.checkpoint.recover import pick_version
from areal_lora.cli.find_run import ADAPTER_HELP, RUN_HELP, VERSION_HELP, Adapter, Run, Version, open_run, run_names
from areal_lora.cli.status import ended
from areal_lora.config.models import json_schema
from areal_lora.config.recorded import cached_snapshot
from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.families.peft_folder import CONFIG_FILE, TENSOR_FILE
from areal_lora.families.registry import is_hub_name
from areal_lora.families.shape import read_shape
from areal_lora.obs.report.live import serve_pages
from areal_lora.obs.report.page import write_report
from areal_lora.obs.report.summary import model_card
from areal_lora.obs.tracking.main import send
from areal_lora.types import AdapterSpec

if TYPE_CHECKING:
    from torch import Tensor

KEEP = "base"
TYPES = ("float32", "bfloat16", "float16")
CARD_FILE = "README.md"
LOCAL_S, SLURM_S = 5.0, 30.0
"""Seconds between two looks at whether the run has ended; those at a job query Slurm."""


def export(
    run: Run,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="folder to make; it must not exist")],
    version: Version = "newest",
    adapter: Adapter = None,
) -> None:
    """Write a version as a PEFT folder that stock peft, transformers and vLLM load; also while the run works."""
    chosen = pick_version(*open_run(run), version, adapter)
    if out.exists():
        raise ConfigError(str(out), "it exists", "name a folder that does not")
    chosen.export(out)
    print(f"{chosen.ref} in {out.absolute()}")


def merge(
    source: Annotated[str, typer.Argument(metavar="RUN|ADAPTER", help="run folder or name, or a PEFT LoRA folder")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="folder to make; it must not exist")],
    version: Annotated[str, typer.Option(metavar="N", help=f"of a run: {VERSION_HELP}")] = "newest",
    adapter: Annotated[str | None, typer.Option(metavar="NAME", help=f"of a run: {ADAPTER_HELP}")] = None,
    base: Annotated[str, typer.Option(metavar="FOLDER", help="model folder, if not where the adapter has it")] = "",
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

    path = Path(os.path.expanduser(source))
    if (path / CONFIG_FILE).is_file():

        def base_of(named: str) -> Path:
            revision = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8")).get("revision")
            return _model_folder(base) if base else _model_folder(named, revision)

        spec, tensors = load_peft(path, lambda named: read_shape(base_of(named)))
        return path.name, base_of(spec.base_model), tensors, spec
    folder, config = open_run(source)
    chosen = pick_version(folder, config, version, adapter)
    spec = chosen.manifest.spec
    return str(chosen.ref), _model_folder(base or config.model.folder), chosen.tensors(), spec


def _model_folder(text: str, revision: str | None = None) -> Path:
    path = Path(os.path.expanduser(text))
    if path.is_dir():
        return path
    cached = cached_snapshot(text, revision) if is_hub_name(text) else None
    if cached is None:
        named = f"{text} at revision {revision}" if revision else text or "the adapter"
        raise ConfigError(named, "its base model is not on this machine", "name it with --base FOLDER")
    return cached


def push(
    run: Run,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="hub name org/name; made if it does not exist")],
    version: Version = "newest",
    adapter: Adapter = None,
    base: Annotated[str, typer.Option(metavar="NAME", help="hub name of the base model, if the run has a folder")] = "",
    public: Annotated[bool, typer.Option("--public", help="make a new repository public; else it is private")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the files and print the card; send nothing")] = False,
) -> None:
    """Send the PEFT folder of a version and a card with the run's figures, and nothing else.

    The token is huggingface_hub's (HF_TOKEN, or that of `hf auth login`).
    """
    if not is_hub_name(repo):
        raise ConfigError(repo, "it is no hub name", "give org/name")
    folder, config = open_run(run)
    chosen = pick_version(folder, config, version, adapter)
    name = base or chosen.manifest.spec.base_model
    if not is_hub_name(name) or Path(name).exists():
        fix = "name the base on the hub: --base org/name"
        raise ConfigError("--base", f"the base model is the folder {name}, which other machines lack", fix)
    with tempfile.TemporaryDirectory(prefix="areal-lora-push-") as scratch:
        out = Path(scratch) / "adapter"
        chosen.export(out, base=name)
        (out / CARD_FILE).write_text(model_card(folder, config, chosen.ref, name, repo), encoding="utf-8")
        files = [CARD_FILE, CONFIG_FILE, TENSOR_FILE]
        for file in files:
            print(f"{file}  {(out / file).stat().st_size / 2**10:.1f} KiB")
        if dry_run:
            print((out / CARD_FILE).read_text(encoding="utf-8"))
            print(f"{chosen.ref} would go to {repo}; nothing was sent")
            return
        print(f"{chosen.ref} in {_send(out, files, repo, str(chosen.ref), private=not public)}")


def _send(folder: Path, files: list[str], repo: str, what: str, *, private: bool) -> str:
    """Upload ``files`` of ``folder`` as one commit; returns its address. Raises EnvironmentError_."""
    api = HfApi()
    operations = [CommitOperationAdd(path_in_repo=file, path_or_fileobj=str(folder / file)) for file in files]
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        return str(api.create_commit(repo, operations, commit_message=f"Adapter {what}").commit_url)
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise EnvironmentError_(
            f"the hub {api.endpoint} did not take {repo}: {reason} (fix: check the name, the token and the connection)"
        ) from None


def report(run: Run) -> None:
    """Write report.html now, also while the run works."""
    folder, _ = open_run(run)
    print(write_report(folder))


def page(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help=RUN_HELP, autocompletion=run_names)],
    port: Annotated[int, typer.Option(min=0, max=65535, help="of 127.0.0.1; 0: a free one")] = 0,
    browser: Annotated[bool, typer.Option("--open", help="open it in the browser")] = False,
) -> None:
    """Serve a page that follows a run, or shows several side by side, until Ctrl-C. For another machine: ssh -L."""
    folders = [open_run(run)[0] for run in runs]

    def announce(address: str) -> None:
        print(f"page  {address}  (Ctrl-C ends it)", flush=True)
        if browser:
            webbrowser.open(address)

    serve_pages(folders, port, announce)


def schema(
    out: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="write it there instead of printing it")] = None,
) -> None:
    """Print the JSON schema of configuration files. An editor uses it with this first line of a file:

    # yaml-language-server: $schema=FILE
    """
    if out is None:
        print(json_schema(), end="")
    else:
        out.write_text(json_schema(), encoding="utf-8")
        print(out)


def track(
    run: Run,
    wandb: Annotated[str | None, typer.Option(metavar="PROJECT", help="project of Weights & Biases")] = None,
    entity: Annotated[str | None, typer.Option(metavar="E", help="user or team of the project")] = None,
    mlflow: Annotated[str | None, typer.Option(metavar="URI", help="address of an MLflow server or store")] = None,
    experiment: Annotated[str | None, typer.Option(metavar="NAME", help="experiment of MLflow")] = None,
    trackio: Annotated[str | None, typer.Option(metavar="PROJECT", help="project of Trackio")] = None,
    swanlab: Annotated[str | None, typer.Option(metavar="PROJECT", help="project of SwanLab")] = None,
    name: Annotated[str | None, typer.Option(metavar="N", help="name that is shown; the run's own if unset")] = None,
    follow: Annotated[bool, typer.Option(help="send what is new until the run ends, or what is there once")] = True,
) -> None:
    """Send the curves of a run, its configuration and its end.

    Repeat the command after any interruption: it continues where it stopped. The run does not depend on it. Keys are
    those of the SDKs: WANDB_API_KEY, MLFLOW_TRACKING_TOKEN and others.
    """
    places = {"wandb": wandb, "mlflow": mlflow, "trackio": trackio, "swanlab": swanlab}
    chosen = [(tracker, place) for tracker, place in places.items() if place is not None]
    if len(chosen) != 1:
        raise ConfigError("track", "it needs one tracker", f"give one of {', '.join(f'--{each}' for each in places)}")
    [(tracker, _)] = chosen
    for option, of, value in (("--entity", "wandb", entity), ("--experiment", "mlflow", experiment)):
        if value is not None and tracker != of:
            raise ConfigError(option, f"it belongs to --{of}", f"leave it out, or give --{of}")
    folder, config = open_run(run)
    state = send(
        folder,
        config,
        *chosen[0],
        lambda: ended(folder, config),
        lambda where: print(f"{folder} is sent to {where}", flush=True),
        within=entity or experiment,
        shown=name,
        wait=follow,
        every_s=SLURM_S if config.cluster.kind == "slurm" else LOCAL_S,
    )
    print(f"the run is {state}; everything is sent" if state else "what was recorded is sent; the run continues")
