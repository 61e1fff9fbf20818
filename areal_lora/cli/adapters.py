"""``areal-lora adapters ...``: create, watch and delete the adapters of a run with a service."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from areal_lora.cli.status import Run as RunArgument
from areal_lora.cli.status import aligned, find_run, run_names
from areal_lora.errors import ConfigError

Run = Annotated[
    str,
    typer.Argument(metavar="RUN", help="run folder, name of a run, or URL of its service", autocompletion=run_names),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="name of the adapter")]
COLUMNS = ("adapter", "state", "step", "reward", "lag", "version", "why")

app = typer.Typer(help="Adapters of a run with a service (--serve).", no_args_is_help=True, rich_markup_mode=None)


@app.command(short_help="Create an adapter from a YAML file.")
def create(
    run: Run,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file: an entry of `adapters`")],
    name: Annotated[str, typer.Option(metavar="NAME", help="name of the adapter, instead of the file's")] = "",
) -> None:
    """Have the run train an adapter. It is durable when the command ends; `show` prints the result."""
    from areal_lora.config.sources import read_source

    section = read_source(file).data | ({"name": name} if name else {})
    accepted = _client(run).post("/v1/adapters", section)
    print(f"{accepted['name']} is accepted, incarnation {accepted['incarnation']}")


@app.command("list", short_help="All adapters, a line each.")
def overview(run: Run) -> None:
    """Your adapters with state, steps, reward and lag."""
    found = _client(run).get("/v1/adapters")["adapters"]
    if not found:
        print("no adapters")
        return
    print(*aligned([COLUMNS, *(_row(adapter) for adapter in found)]), sep="\n")


@app.command(short_help="One adapter with its settings.")
def show(run: Run, name: Name) -> None:
    """State, figures and settings of an adapter."""
    for key, value in _client(run).get(_path(name)).items():
        print(f"{key:<12} {_text(value)}")


@app.command(short_help="Let an adapter take no steps for a while.")
def pause(run: Run, name: Name) -> None:
    """The adapter stays on the servers and takes no further steps until `resume`."""
    _wanted(_client(run).post(_path(name, "pause")))


@app.command(short_help="Let a paused adapter train.")
def resume(run: Run, name: Name) -> None:
    """The adapter takes steps again."""
    _wanted(_client(run).post(_path(name, "resume")))


@app.command(short_help="Take an adapter out of the run.")
def delete(run: Run, name: Name) -> None:
    """The adapter leaves trainer and servers. Its name may be used again."""
    _wanted(_client(run).delete(_path(name)))


@app.command(short_help="States of an adapter, with reasons.")
def logs(run: Run, name: Name) -> None:
    """Every change of state, oldest first."""
    for record in _client(run).get(_path(name, "logs"))["states"]:
        reason = f": {record['reason']}" if record.get("reason") else ""
        print(f"{record['time_s']:9.1f} s  v{record['version']}  {record['state']}{reason}")


@app.command(short_help="Records of an adapter as JSON lines.")
def metrics(
    run: Run,
    name: Name,
    after: Annotated[int, typer.Option(min=0, metavar="N", help="leave out the first N records")] = 0,
) -> None:
    """The adapter's records, one JSON object per line, as metrics.jsonl has them."""
    client = _client(run)
    while (page := client.get(_path(name, "metrics"), after=after))["records"]:
        for record in page["records"]:
            print(json.dumps(record))
        after = page["next"]


@app.command(short_help="A version as a tar of its PEFT folder.")
def download(
    run: Run,
    name: Name,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="tar file to write")],
    version: Annotated[str, typer.Option(metavar="N", help="a number, newest or best")] = "newest",
) -> None:
    """Write adapter_model.safetensors and adapter_config.json as a tar file."""
    size = _client(run).download(_path(name, "download"), out, version=version)
    print(f"{out}: {size} bytes")


@app.command(short_help="Tenants and their keys.")
def keys(
    run: Run,
    tenant: Annotated[str, typer.Argument(metavar="[TENANT]", help="make this tenant a key")] = "",
    label: Annotated[str, typer.Option(metavar="NAME", help="name of the key; a key of that name ends")] = "default",
    remove: Annotated[bool, typer.Option("--remove", help="end the key instead")] = False,
    quota: Annotated[
        list[str] | None, typer.Option(metavar="KEY=N", help="another limit of the tenant, such as rank=64")
    ] = None,
) -> None:
    """Make, replace or end a key, with the operator's key. Without TENANT all tenants are listed."""
    client = _client(run)
    if not tenant:
        for found in client.get("/v1/tenants")["tenants"]:
            print(f"{found['tenant']}: keys {', '.join(found['keys']) or 'none'}")
        return
    path = f"/v1/tenants/{quote(tenant, safe='')}/keys"
    if remove:
        client.delete(f"{path}/{quote(label, safe='')}")
        print(f"{tenant}: key {label} has ended")
        return
    client.post("/v1/tenants", {"tenant": tenant, "quota": dict(_limit(text) for text in quota or [])})
    print(client.post(path, {"label": label})["key"])


def _wanted(changed: dict[str, Any]) -> None:
    print(f"{changed['name']} is wanted {changed['wanted']}")


def _client(run: str) -> Any:
    from areal_lora.cli.service_client import ServiceClient

    return ServiceClient(run)


def _path(name: str, *more: str) -> str:
    return "/".join(["/v1/adapters", quote(name, safe=""), *more])


def _limit(text: str) -> tuple[str, float]:
    key, _, number = text.partition("=")
    try:
        return key, float(number) if "." in number else int(number)
    except ValueError:
        raise ConfigError("--quota", f"{text!r} is no limit", "write it like adapters=2") from None


def _row(adapter: dict[str, Any]) -> Sequence[str]:
    state = adapter["phase"] or "waits"
    if adapter["wanted"] != "active" and adapter["wanted"] != state:
        state += f" ({adapter['wanted']} is wanted)"
    reward, lag, version = adapter["reward"], adapter["lag"], adapter["version"]
    return (
        adapter["name"],
        state,
        str(adapter["step"]),
        "-" if reward is None else f"{reward:.3f}",
        "-" if lag is None else f"{lag:.2f}",
        "-" if version is None else f"v{version}",
        adapter["reason"] or "-",
    )


def _text(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def add_servers(
    run: RunArgument,
    servers: Annotated[int, typer.Option(help="servers to add; on Slurm, of each node")] = 1,
    nodes: Annotated[int, typer.Option(help="Slurm jobs of one node each")] = 1,
    time: Annotated[str, typer.Option(help="time limit of the Slurm jobs, instead of the run's")] = "",
    partition: Annotated[str, typer.Option(help="partition of the Slurm jobs, instead of the run's")] = "",
    grace_s: Annotated[float, typer.Option(help="seconds for requests in progress when a server leaves")] = 20.0,
    here: Annotated[bool, typer.Option("--here", help="on this machine, also for a run on Slurm")] = False,
) -> None:
    """Add rollout servers to a run in progress, as Slurm jobs of one node each, or on this machine.

    On this machine the command stays until the run ends; Ctrl-C lets the servers leave in order.
    """
    from rich.console import Console

    from areal_lora.launcher import add_servers as action
    from areal_lora.launcher.slurm.job_steps import SpareJob

    console, job = Console(highlight=False), SpareJob(servers, grace_s, time, partition)
    raise typer.Exit(action.add_servers(find_run(run), job, nodes=nodes, here=here, console=console))


def remove_servers(
    run: RunArgument, job: Annotated[str, typer.Option(help="only those of this Slurm job, or of this process")] = ""
) -> None:
    """Have added servers leave: they take no more requests, end those in progress, and the run continues."""
    from rich.console import Console

    from areal_lora.launcher.add_servers import remove_servers as action

    action(find_run(run), job=job, console=Console(highlight=False))
