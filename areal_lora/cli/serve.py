"""``areal-lora serve`` and ``chat``: a version behind vLLM's OpenAI server on loopback, a child of the command."""

import contextlib
import http.client
import json
import os
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from areal_lora.checkpoint.recover import BASE, pick_version
from areal_lora.cli.adapters import open_url
from areal_lora.cli.find_run import Adapter, AnyVersion, Run, open_run
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.recorded import adapter_named
from areal_lora.data.prompts import Formatter, Prompt, load_tokenizer
from areal_lora.errors import ConfigError, EnvironmentError_, ExitCode, ProcessFailed, RolloutError
from areal_lora.launcher.plan import SERVER, ProcessSpec
from areal_lora.launcher.supervise import Supervisor, handled
from areal_lora.network.http_server import listening
from areal_lora.obs.report.version_answers import VersionAnswers, save_answers
from areal_lora.processes.log import printable, setup_logging
from areal_lora.processes.startup import raise_open_files
from areal_lora.rollout.controller.eval_sets import load_sets
from areal_lora.run_folder.events import now_utc
from areal_lora.run_folder.paths import RunFolder
from areal_lora.tasks.datasets import typed_sample
from areal_lora.types import Sample

START_S, STOP_S, POLL_S = 900.0, 20.0, 0.2
ANSWER_S = 600.0
LOG_LINES = 12
TOKEN = "AREAL_LORA_REMOTE_TOKEN"


def serve(
    run: Run,
    version: AnyVersion = "newest",
    adapter: Adapter = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port on 127.0.0.1; 0: a free one")] = 8000,
) -> None:
    """Serve a version with vLLM's own OpenAI server until Ctrl-C; only this machine can reach it.

    The version is exported to a temporary folder; neither the run nor its folder changes.
    """
    folder, config = open_run(run)
    chosen = adapter_named(config, adapter)
    print(f"Starting vLLM with {version} of {folder}", flush=True)
    with served(folder, config, chosen, [version], port) as server:
        [model] = server.models
        body = json.dumps({"model": model, "prompt": "Q: 2 + 2?\nA:", "max_tokens": 32})
        print(f"{model} answers at {server.url} (Ctrl-C ends it). Try it:", flush=True)
        print(f"  curl {server.url}/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)
        server.wait()


def serve_remote(
    url: Annotated[str, typer.Argument(metavar="URL", help="of the gateway; `areal-lora status RUN` shows it")],
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"copy of the run's remote.token, mode 0600; else {TOKEN}")
    ] = None,
    model: Annotated[Path | None, typer.Option(metavar="FOLDER", help="base model; the run's folder if unset")] = None,
    device: Annotated[str | None, typer.Option(metavar="TYPE", help="cpu, cuda or npu; the run's if unset")] = None,
) -> None:
    """Serve in a run that needs no way to this machine: a server here fetches its requests and versions over HTTP.

    It joins as one more rollout server. Ctrl-C leaves the run, and so does any other end of the command.
    """
    from areal_lora.engine.vllm_ext.remote.remote_server import run_remote

    raise_open_files()
    setup_logging("serve-remote")
    run_remote(url, _token(token_file), model=model, device=device)


def _token(path: Path | None) -> str:
    """The token of a file that only its owner can read, or of the environment, from which it is removed."""
    if path is None:
        if not (token := os.environ.pop(TOKEN, "")):
            raise ConfigError(
                "--token-file", f"there is no token, and {TOKEN} is not set", "copy the run's remote.token"
            )
        return token
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError("--token-file", f"{path} can be read by others", f"chmod 600 {path}")
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--token-file", f"{path} cannot be read: {error}", "copy the run's remote.token") from None


def chat(
    run: Run,
    version: AnyVersion = "newest",
    adapter: Adapter = None,
    against: Annotated[str | None, typer.Option(metavar="N", help="a second version, which answers, too")] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="send this, print the answer and end")] = None,
    held_out: Annotated[int, typer.Option(min=0, metavar="N", help="send the first N held-out problems and end")] = 0,
    save: Annotated[bool, typer.Option("--save", help="show prompts and answers on the page of the run, too")] = False,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token each time")] = 0.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="longest answer; the run's if not given")] = None,
) -> None:
    """Talk to a version in the terminal. What you type is written in the format of the run's task.

    A chat task keeps the conversation; /new starts another one. Ctrl-D ends. A file as standard input has a prompt on
    each line.
    """
    folder, config = open_run(run)
    chosen = adapter_named(config, adapter)
    tokenizer = load_tokenizer(config.model.folder)
    formatter, sampling = Formatter(tokenizer=tokenizer, how=chosen.task.format), chosen.sampling
    problems: Sequence[Prompt] = ()
    if held_out:
        first = load_sets(config, chosen, tokenizer)[0]
        formatter, sampling, problems = first.formatter, first.sampling, first.held_out.prompts[:held_out]

    def show(text: str, answers: dict[str, str], gold: str = "") -> None:
        several = len(answers) > 1
        print(printable("\n".join(f"{name}:\n{x}" if several else x for name, x in answers.items())), flush=True)
        if save:
            save_answers(folder, VersionAnswers(at=now_utc(), prompt=text, gold=gold, answers=answers))

    versions = [version] if against is None else [version, against]
    print(f"starting vLLM with {' and '.join(versions)} of {folder}", file=sys.stderr, flush=True)
    with served(folder, config, chosen, versions, 0) as server:
        longest = max_tokens or sampling.max_new_tokens
        talks = [Conversation(chosen, formatter, server, m, temperature, longest) for m in server.models]
        for problem in problems:
            print(printable(problem.text))
            show(problem.text, {talk.model: talk.complete(problem.sample) for talk in talks}, problem.sample.gold)
        if prompt is not None:
            show(prompt, {talk.model: talk.answer(prompt) for talk in talks})
        if problems or prompt is not None:
            return
        print(f"{' and '.join(server.models)} listen; /new starts again, Ctrl-D ends", file=sys.stderr)
        while (text := _typed()) is not None:
            if text == "/new":
                for talk in talks:
                    talk.turns.clear()
            elif text:
                show(text, {talk.model: talk.answer(text) for talk in talks})


def _typed() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingEndpoint:
    """A server that answers; ``models`` are the names that requests give, one for each version."""

    url: str
    models: tuple[str, ...]
    processes: Supervisor
    log: Path

    def wait(self) -> None:
        """Until the server ends, which is always a failure: raises ProcessFailed."""
        while not (ended := self.processes.poll()):
            time.sleep(POLL_S)
        raise _failed(f"ended with code {ended[0].code}", self.log)


@contextlib.contextmanager
def served(
    folder: RunFolder, config: Config, adapter: AdapterConfig, versions: Sequence[str], port: int
) -> Iterator[ServingEndpoint]:
    """Export versions of ``adapter`` to a temporary folder and serve them until the block ends; port 0: a free one.

    `BASE` among them is the base model.

    Raises ConfigError for a version or port that is not available, ProcessFailed with the last lines of a server that
    does not start.
    """
    picked = {text: pick_version(folder, config, text, adapter.name) for text in versions if text != BASE}
    chosen = {str(version.ref): version for version in picked.values()}
    models = tuple(dict.fromkeys(str(picked[text].ref) if text in picked else BASE for text in versions))
    with listening("127.0.0.1", port, "--port") as probe:
        port = probe.getsockname()[1]
    ctrl_c = handled(signal.SIGTERM, signal.default_int_handler)  # SIGTERM leaves no more behind than Ctrl-C
    with tempfile.TemporaryDirectory(prefix="areal-lora-") as temporary, ctrl_c:
        for name, version in chosen.items():
            version.export(Path(temporary) / name)
        command = [config.rollout.python or sys.executable, "-m", "areal_lora.engine.vllm_ext.stock"]
        command += ["--run-folder", str(folder), "--port", str(port)]
        command += ["--lora", *(f"{name}={Path(temporary) / name}" for name in chosen)]
        spec = ProcessSpec(SERVER, 0, tuple(command), {})
        url, log = f"http://127.0.0.1:{port}/v1", Path(temporary) / f"{spec.name}.log"
        with Supervisor(log.parent, STOP_S) as processes:
            processes.start([spec])
            _wait(processes, f"{url}/models", log)
            yield ServingEndpoint(url=url, models=models, processes=processes, log=log)


def _wait(processes: Supervisor, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        code = next((ended.code for ended in processes.poll()), None)
        if code is not None or time.monotonic() > deadline:
            if code == ExitCode.MISSING:
                raise EnvironmentError_(log.read_text(errors="replace").strip().removeprefix("error: "))
            raise _failed(f"ended with code {code}" if code is not None else f"did not answer in {START_S:g} s", log)
        try:
            with open_url(urllib.request.Request(url), 5.0):
                return
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError):
            time.sleep(POLL_S)


def _failed(what: str, log: Path) -> ProcessFailed:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    print("\n".join(lines[-LOG_LINES:]), file=sys.stderr)
    return ProcessFailed(f"the server {what}; its last lines are above")


@dataclass
class Conversation:
    """``turns`` are the messages so far; a task without chat format has none."""

    adapter: AdapterConfig
    formatter: Formatter
    server: ServingEndpoint
    model: str
    temperature: float
    max_tokens: int
    turns: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, text: str) -> str:
        """The answer to ``text`` as the next turn. Raises RolloutError with the server's reason."""
        sample = typed_sample(self.adapter.task, text, self.turns)
        answer = self.complete(sample)
        if sample.messages is not None:
            self.turns += [sample.messages[-1], {"role": "assistant", "content": answer}]
        return answer.strip()

    def complete(self, sample: Sample) -> str:
        """The answer to ``sample``, with the text that each answer starts with. Raises as `answer`."""
        body = {
            "model": self.model,
            "prompt": self.formatter.token_ids(sample),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stop": self.adapter.sampling.stop,
            "stop_token_ids": self.formatter.ends,
        }
        text: str = _post(f"{self.server.url}/completions", body)["choices"][0]["text"]
        return self.formatter.how.prefill + text


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with open_url(request, ANSWER_S) as answer:
            content: dict[str, Any] = json.loads(answer.read())
            return content
    except urllib.error.HTTPError as error:
        reason = " ".join(error.read().decode(errors="replace").split())
        raise RolloutError(f"the server refuses the prompt: {reason[:300]} (fix: a shorter prompt or answer)") from None
    except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
        raise RolloutError(f"{url}: {error} (fix: start the command again)") from None
