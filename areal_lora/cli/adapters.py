"""``areal-lora adapters ...``: create, watch and delete the adapters of a run with a service.

A request carries the key in the run folder, or that in ``AREAL_LORA_KEY``.
"""

import http.client
import json
import os
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from areal_lora.cli.find_run import aligned, find_run, run_names
from areal_lora.config.load import read_source
from areal_lora.errors import ConfigError, RolloutError
from areal_lora.network.addresses import on_loopback
from areal_lora.run_folder.paths import RunFolder, replacing
from areal_lora.run_folder.rendezvous import read_endpoint

Run = Annotated[
    str,
    typer.Argument(metavar="RUN", help="run folder, name of a run, or URL of its service", autocompletion=run_names),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="name of the adapter")]
KEY_VARIABLE = "AREAL_LORA_KEY"
TRIES, AGAIN_S, ANSWER_S = 20, 0.5, 120.0
"""The service may be restarting: the same request, under the same idempotency key, is sent again."""
COLUMNS = ("adapter", "state", "step", "reward", "lag", "version", "why")

app = typer.Typer(
    help="Adapters of a run with a service (--serve).",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


@app.command(short_help="Create an adapter from a YAML file.")
def create(
    run: Run,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file: an entry of `adapters`")],
    name: Annotated[str, typer.Option(metavar="NAME", help="name of the adapter, instead of the file's")] = "",
) -> None:
    """Have the run train an adapter. It is durable when the command ends; `show` prints the result."""
    section = read_source(file) | ({"name": name} if name else {})
    accepted = ServiceClient(run).post("/v1/adapters", section)
    print(f"{accepted['name']} is accepted, incarnation {accepted['incarnation']}")


@app.command("list", short_help="All adapters, a line each.")
def overview(run: Run) -> None:
    """Your adapters with state, steps, reward and lag."""
    found = ServiceClient(run).get("/v1/adapters")["adapters"]
    if not found:
        print("no adapters")
        return
    print(*aligned([COLUMNS, *(_row(adapter) for adapter in found)]), sep="\n")


@app.command(short_help="One adapter with its settings.")
def show(run: Run, name: Name) -> None:
    """State, figures and settings of an adapter."""
    for key, value in ServiceClient(run).get(_path(name)).items():
        print(f"{key:<12} {_text(value)}")


@app.command(short_help="Let an adapter take no steps for a while.")
def pause(run: Run, name: Name) -> None:
    """The adapter stays on the servers and takes no further steps until `resume`."""
    _wanted(ServiceClient(run).post(_path(name, "pause")))


@app.command(short_help="Let a paused adapter train.")
def resume(run: Run, name: Name) -> None:
    """The adapter takes steps again."""
    _wanted(ServiceClient(run).post(_path(name, "resume")))


@app.command(short_help="Take an adapter out of the run.")
def delete(run: Run, name: Name) -> None:
    """The adapter leaves trainer and servers. Its name may be used again."""
    _wanted(ServiceClient(run).delete(_path(name)))


@app.command(short_help="States of an adapter, with reasons.")
def logs(run: Run, name: Name) -> None:
    """Every change of state, oldest first."""
    for record in ServiceClient(run).get(_path(name, "logs"))["states"]:
        reason = f": {record['reason']}" if record.get("reason") else ""
        print(f"{record['time_s']:9.1f} s  v{record['version']}  {record['state']}{reason}")


@app.command(short_help="Records of an adapter as JSON lines.")
def metrics(
    run: Run,
    name: Name,
    after: Annotated[int, typer.Option(min=0, metavar="N", help="leave out the first N records")] = 0,
) -> None:
    """The adapter's records, one JSON object per line, as metrics.jsonl has them."""
    client = ServiceClient(run)
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
    size = ServiceClient(run).download(_path(name, "download"), out, version=version)
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
    """Make, replace or end a key, with the operator's key. Without TENANT all tenants are listed.

    With --quota the keys of a tenant stay as they are; one that has none gets one.
    """
    client = ServiceClient(run)
    if not tenant:
        for found in client.get("/v1/tenants")["tenants"]:
            print(f"{found['tenant']}: keys {', '.join(found['keys']) or 'none'}")
        return
    path = f"/v1/tenants/{urllib.parse.quote(tenant, safe='')}/keys"
    if remove:
        client.delete(f"{path}/{urllib.parse.quote(label, safe='')}")
        print(f"{tenant}: key {label} has ended")
        return
    made = client.post("/v1/tenants", {"tenant": tenant, "quota": dict(_limit(text) for text in quota or [])})
    if quota and made["keys"]:
        print(f"{tenant}: quota {json.dumps(made['quota'])}")
        return
    print(client.post(path, {"label": label})["key"])


def _wanted(changed: dict[str, Any]) -> None:
    print(f"{changed['name']} is wanted {changed['wanted']}")


def _path(name: str, *more: str) -> str:
    return "/".join(["/v1/adapters", urllib.parse.quote(name, safe=""), *more])


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


@dataclass(frozen=True, slots=True)
class ServiceClient:
    """Requests to the service of a run. ``where`` is the run, or the URL of its service."""

    where: str

    def get(self, path: str, **query: str | int) -> Any:
        return self._json("GET", path + (f"?{urllib.parse.urlencode(query)}" if query else ""))

    def post(self, path: str, body: object = None) -> Any:
        return self._json("POST", path, body)

    def delete(self, path: str) -> Any:
        return self._json("DELETE", path)

    def download(self, path: str, out: Path, **query: str) -> int:
        """Write the answer to ``out``, whole or not at all; returns its size."""
        with self._answer("GET", f"{path}?{urllib.parse.urlencode(query)}", None) as answer, replacing(out) as file:
            shutil.copyfileobj(answer, file, 1 << 20)
            return file.tell()

    def _json(self, method: str, path: str, body: object = None) -> Any:
        with self._answer(method, path, body) as answer:
            return json.load(answer)

    def _answer(self, method: str, path: str, body: object) -> IO[bytes]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Idempotency-Key": str(uuid.uuid4()), "Content-Type": "application/json"}
        for tries_left in reversed(range(TRIES)):
            try:
                url, key = self._place()
                headers["Authorization"] = f"Bearer {key}"
                request = urllib.request.Request(f"{url}{path}", data, headers, method=method)
                return open_url(request, ANSWER_S)
            except urllib.error.HTTPError as error:
                raise _refused(error) from None
            except (urllib.error.URLError, ConnectionError, http.client.HTTPException) as error:
                if not tries_left:
                    text = f"{self.where}: the service does not answer: {error} (fix: look at its log)"
                    raise RolloutError(text) from None
                time.sleep(AGAIN_S)
        raise AssertionError("the last try returns or raises")

    def _place(self) -> tuple[str, str]:
        """URL and key. Raises ConnectionError while a service starts."""
        key = os.environ.get(KEY_VARIABLE, "")
        if self.where.startswith(("http://", "https://")):
            if not key:
                raise ConfigError(KEY_VARIABLE, "it is not set", f"export {KEY_VARIABLE}=... with your key")
            return self.where.rstrip("/"), key
        folder = find_run(self.where)
        if (endpoint := read_endpoint(folder, "service", 0)) is not None:
            return f"http://{endpoint.host}:{endpoint.ports['api']}", key or _key_of(folder)
        if folder.service_tables.exists():
            raise ConnectionError("it has published no address")
        raise ConfigError(str(folder), "no service works there", "start the run with --serve, or wait until it is up")


def _key_of(folder: RunFolder) -> str:
    try:
        return folder.service_key.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        fix = "wait until the service is up, or set AREAL_LORA_KEY"
        raise ConfigError(str(folder.service_key), "there is no key", fix) from None


def _refused(error: urllib.error.HTTPError) -> ConfigError:
    """The service's own error; another server's is named as such."""
    try:
        detail = json.load(error)["error"]
        return ConfigError(detail["path"], detail["reason"], detail["fix"])
    except (ValueError, KeyError, TypeError):
        return ConfigError(str(error.url), f"it answers {error.code}", "check that it is the service of a run")


def open_url(request: urllib.request.Request, timeout_s: float) -> http.client.HTTPResponse:
    """As ``urllib.request.urlopen``. ``http_proxy`` is not used for loopback: it would get the key, and not answer."""
    to_itself = on_loopback(urllib.parse.urlsplit(request.full_url).hostname or "")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({} if to_itself else None))
    answer: http.client.HTTPResponse = opener.open(request, timeout=timeout_s)
    return answer
