"""Run environments of others in a process of their own: ``python -I environment_child.py``, Python 3.10 or newer.

Imports nothing but the standard library and what the kind of environment needs: ``verifiers``, ``mcp`` or user code.
Messages are JSON after 4 bytes of length (big-endian), on the standard input and output that this process started with;
user code prints to standard error. `environment_workers` has their types. Samples run at the same time in one event
loop, blocking code in threads. A sample that is cancelled is answered when its last thread has ended. At the end of its
input the process ends its whole group.
"""

import asyncio
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import shlex
import signal
import sys
import threading
import traceback
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

MAX_THREADS = 256
BAD_REQUEST = 400
MISTAKES = (TypeError, NameError, AttributeError, ImportError, NotImplementedError, SyntaxError)
"""Of code: another try fails in the same way."""

Task = Any
"""A namespace: ``base_url``, ``api_key``, ``model``, ``sample`` (``uid``, ``prompt``, ``answer``, ``messages``,
``columns``), ``timeout_s``, ``seed``: that of the group."""


async def called(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """The result of ``function``, run in a thread if it is no coroutine function."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **keywords)
    work = functools.partial(function, *arguments, **keywords)
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        result = await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})  # the sample has ended when its thread has
        raise
    return await result if inspect.isawaitable(result) else result


def load(name: str) -> Callable[..., Any]:
    """What ``module:name`` or ``file.py:name`` names."""
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        found: Callable[..., Any] = getattr(importlib.import_module(place), attribute)
        return found
    sys.path.append(str(Path(place).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    found = getattr(module, attribute)
    return found


class Chat:
    """A conversation with the model of a sample's session."""

    def __init__(self, task: Task, *messages: dict[str, Any]) -> None:
        self.task, self.messages = task, list(messages)

    async def answer(self, tools: list[dict[str, Any]] | None = None) -> dict[str, Any] | None:
        """The model's next message, which is kept; None if the conversation has no room for another one."""
        try:
            reply = await called(self._post, {"tools": tools} if tools else {})
        except urllib.error.HTTPError as error:
            reason = error.read().decode(errors="replace")
            if error.code == BAD_REQUEST and any(message["role"] == "assistant" for message in self.messages):
                print(f"a conversation ends: {reason}", file=sys.stderr)
                return None
            raise RuntimeError(f"the model's endpoint answers {error.code}: {reason}") from None
        message: dict[str, Any] = reply["choices"][0]["message"]
        self.messages.append(message)
        return message

    def _post(self, settings: dict[str, Any]) -> Any:
        body = json.dumps({"model": self.task.model, "messages": self.messages, **settings}).encode()
        headers = {"Authorization": f"Bearer {self.task.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.task.base_url}/chat/completions", body, headers)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the endpoint is on loopback
        with direct.open(request, timeout=self.task.timeout_s) as response:
            return json.load(response)


class Gym:
    """A class with gymnasium's ``reset`` and ``step``: texts are observations, answers are actions."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.made = functools.partial(load(setup["env"]), **setup["args"])

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        yield

    async def play(self, task: Task) -> dict[str, Any]:
        environment = await called(self.made)
        try:
            observation, _ = await called(environment.reset, seed=task.seed, options=vars(task.sample))
            chat, total, ended = Chat(task), 0.0, False
            while not ended:
                chat.messages.append({"role": "user", "content": str(observation)})
                if (message := await chat.answer()) is None:
                    break
                observation, reward, done, cut, _ = await called(environment.step, message["content"] or "")
                total, ended = total + float(reward), done or cut
            return {"reward": total}
        finally:
            if (close := getattr(environment, "close", None)) is not None:
                await called(close)


class Mcp:
    """The servers' tools are the model's, until it answers without a call. The configured reward scores the answer."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.servers = setup["env"]
        importlib.import_module("mcp")

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        yield

    async def play(self, task: Task) -> dict[str, Any]:
        async with AsyncExitStack() as stack:
            sessions, tools = dict[str, Any](), list[dict[str, Any]]()
            for server in self.servers:
                session = await stack.enter_async_context(_mcp_session(server))
                for tool in (await session.list_tools()).tools:
                    wire = tool.model_dump(by_alias=True)
                    function = {
                        "name": tool.name,
                        "description": tool.description or "",
                        "parameters": wire["inputSchema"],
                    }
                    sessions[tool.name] = session
                    tools.append({"type": "function", "function": function})
            prompt = task.sample.messages or [{"role": "user", "content": task.sample.prompt}]
            chat = Chat(task, *prompt)
            while (message := await chat.answer(tools)) is not None and message.get("tool_calls"):
                for call in message["tool_calls"]:
                    text = await _tool_text(sessions, call["function"])
                    chat.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            return {}


@asynccontextmanager
async def _mcp_session(server: str) -> AsyncIterator[Any]:
    """A session with the server behind a URL, or one that this command starts."""
    mcp = importlib.import_module("mcp")
    if server.startswith(("http://", "https://")):
        connected = importlib.import_module("mcp.client.streamable_http").streamable_http_client(server)
    else:
        command, *arguments = shlex.split(server)
        parameters = mcp.StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
        connected = importlib.import_module("mcp.client.stdio").stdio_client(parameters)
    async with connected as streams, mcp.ClientSession(*streams[:2]) as session:
        await session.initialize()
        yield session


async def _tool_text(sessions: dict[str, Any], function: dict[str, str]) -> str:
    """What the tool returned, or why it was not called, for the model to read."""
    try:
        arguments = json.loads(function["arguments"])
        if function["name"] not in sessions or not isinstance(arguments, dict):
            raise ValueError("no such tool, or its arguments are no object")
    except ValueError as error:
        return f"error: {error}"
    result = await sessions[function["name"]].call_tool(function["name"], arguments)
    return "\n".join(part.text for part in result.content if part.type == "text")


class Verifiers:
    """An environment of the package ``verifiers``: tasks, harness and rubric are its own.

    Row i of the adapter's training task is task i, held-out row i the i-th from the end.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self.api = importlib.import_module("verifiers.v1")
        args = setup["args"]
        chosen = {**args, "taskset": {**args.get("taskset", {}), "id": setup["env"]}}
        self.environment = self.api.load_environment(self.api.resolve_env_config(chosen))
        self.tasks: list[Any] = []
        self.more = iter(self.environment.taskset)
        self.numbers = itertools.count()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with self.environment.serving():
            yield

    def _task(self, uid: str) -> Any:
        number = int(uid.rpartition("/")[2])
        bounded = self.environment.taskset.bounded
        missing = None if bounded else max(0, number + 1 - len(self.tasks))
        self.tasks += itertools.islice(self.more, missing)
        if not self.tasks:
            raise RuntimeError("the taskset has no tasks")
        return self.tasks[(-1 - number if "/eval/" in uid else number) % len(self.tasks)]

    async def play(self, task: Task) -> dict[str, Any]:
        variable = f"SAMPLE_{next(self.numbers)}_API_KEY"  # programs of the harness do not inherit such names
        os.environ[variable] = task.api_key
        try:
            client = self.api.EvalClientConfig(base_url=task.base_url, api_key_var=variable)
            context = self.api.ModelContext(client=client, model=task.model)
            (slot,) = self.environment.slots(self._task(task.sample.uid))
            episode = await self.environment.run_slot(slot, context)
        finally:
            del os.environ[variable]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "not completed")
        parts = dict[str, float]()
        for trace in episode.traces:
            rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
            parts |= rewards | {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return {"reward": sum(trace.reward for trace in episode.traces) / len(episode.traces), "metrics": parts}


KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {"gym": Gym, "mcp": Mcp, "verifiers": Verifiers}


def read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message; None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    message: dict[str, Any] = json.loads(stream.read(int.from_bytes(head, "big")))
    return message


def write(stream: BinaryIO, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    stream.write(len(body).to_bytes(4, "big") + body)
    stream.flush()


def failure(error: BaseException) -> dict[str, Any]:
    """The error for the parent; its traceback for the log."""
    traceback.print_exception(type(error), error, error.__traceback__)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return {"error": f"{type(error).__name__}: {error}{where}", "mistake": isinstance(error, MISTAKES)}


async def serve(setup: dict[str, Any], requests: BinaryIO, replies: BinaryIO) -> None:
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()
    loop.set_default_executor(ThreadPoolExecutor(MAX_THREADS))
    running = dict[int, asyncio.Task[dict[str, Any]]]()

    def receive() -> None:
        while (message := read(requests)) is not None:
            loop.call_soon_threadsafe(queue.put_nowait, message)
        os.killpg(0, signal.SIGKILL)  # the parent has ended

    def answer(number: int, ended: "asyncio.Task[dict[str, Any]]") -> None:
        del running[number]
        if ended.cancelled():
            played: dict[str, Any] = {"error": "cancelled"}
        else:
            error = ended.exception()
            played = ended.result() if error is None else failure(error)
        write(replies, {"number": number, **played})

    environment = await called(KINDS[setup["kind"]], setup)
    async with environment.opened():
        write(replies, {"number": 0})
        threading.Thread(target=receive, daemon=True).start()
        while True:
            message = await queue.get()
            number = message["number"]
            if message["task"] is not None:
                task = SimpleNamespace(**message["task"])
                task.sample = SimpleNamespace(**task.sample)
                running[number] = asyncio.create_task(environment.play(task))
                running[number].add_done_callback(functools.partial(answer, number))
            elif number in running:  # else it has just been answered
                running[number].cancel()


async def serve_until_error(setup: dict[str, Any], requests: BinaryIO, replies: BinaryIO) -> None:
    serving = asyncio.create_task(serve(setup, requests, replies))
    await asyncio.wait({serving})
    error = serving.exception()
    assert error is not None  # it has no other end
    write(replies, {"number": 0, **failure(error)})


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this process
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    setup = read(requests)
    if setup is not None:
        # Programs of the interpreter's environment come first, as after its `activate`.
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        sys.path += [folder for folder in setup["search_path"] if folder not in sys.path]
        asyncio.run(serve_until_error(setup["settings"], requests, replies))


if __name__ == "__main__":
    main()
