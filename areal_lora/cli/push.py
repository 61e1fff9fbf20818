"""``areal-lora push RUN REPO``: a version's adapter to the hub, with a model card."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from areal_lora.cli.runs import ADAPTER_HELP, RUN_HELP, VERSION_HELP, find_run, recorded_config
from areal_lora.errors import ConfigError, EnvironmentError_

CARD_FILE = "README.md"


def push(
    run: Annotated[str, typer.Argument(help=RUN_HELP)],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="hub name org/name; made if it does not exist")],
    version: Annotated[str, typer.Option(metavar="N", help=VERSION_HELP)] = "newest",
    adapter: Annotated[str | None, typer.Option(metavar="NAME", help=ADAPTER_HELP)] = None,
    base: Annotated[str, typer.Option(metavar="NAME", help="hub name of the base model, if the run has a folder")] = "",
    public: Annotated[bool, typer.Option("--public", help="make a new repository public; else it is private")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the files and print the card; send nothing")] = False,
) -> None:
    """Send the PEFT folder of a version and a card with the run's figures, and nothing else.

    The token is huggingface_hub's (HF_TOKEN, or that of `hf auth login`).
    """
    from areal_lora.checkpoint.versions import pick_version
    from areal_lora.families.peft_folder import CONFIG_FILE, TENSOR_FILE
    from areal_lora.families.published import is_hub_name
    from areal_lora.obs.report.card import model_card

    if not is_hub_name(repo):
        raise ConfigError(repo, "it is no hub name", "give org/name")
    folder = find_run(run)
    config = recorded_config(folder)
    chosen = pick_version(folder, config, version, adapter)
    name = base or chosen.base
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
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

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
