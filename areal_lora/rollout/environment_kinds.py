"""Kinds of environments and agents that a worker process plays (`environment_child`); Python 3.10 or newer.

Imports nothing but the standard library and the package that a kind needs, or user code.
"""

import asyncio
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import shlex
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

BAD_REQUEST = 400

Task = Any
"""A namespace with the ``sample``; ``call`` returns the controller's answer to any JSON, ``answer`` to a `Reply`. Of
those that call the endpoint with the fields of `AgentTask`, and ``seed``: that of the group."""


async def called(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """The result of ``function``, run in a thread if it is no coroutine function. Its SystemExit is a RuntimeError."""
    started, dropped = list[bool](), list[bool]()

    def work() -> Any:
        started.append(True)
        try:
            return None if dropped else function(*arguments, **keywords)
        except (StopIteration, SystemExit) as error:  # a future takes the one for its own, the other ends the process
            raise _ordinary(error) from error

    if inspect.iscoroutinefunction(function):
        result = work()
    else:
        running = asyncio.get_running_loop().run_in_executor(None, work)
        try:
            result = await asyncio.shield(running)
        except asyncio.CancelledError:
            dropped.append(True)  # what has no thread yet does nothing
            if started:
                await asyncio.wait({running})  # the sample has ended when its thread has
            raise
    try:
        return await result if inspect.isawaitable(result) else result
    except SystemExit as error:
        raise _ordinary(error) from error


def _ordinary(error: BaseException) -> RuntimeError:
    return RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


def load(name: str) -> Callable[..., Any]:
    """What ``module:name`` or ``file.py:name`` names."""
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        file = Path(place).resolve()
        sys.path.append(str(file.parent))
        known = importlib.util.find_spec(file.stem) if file.stem.isidentifier() else None
        # Its neighbours import it by its own name, unless that is the name of an installed module.
        own = known is not None and Path(known.origin or "").resolve() == file
        spec: Any = importlib.util.spec_from_file_location(file.stem if own else f"areal_lora_user_{file.stem}", place)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look it up
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    found: Callable[..., Any] = getattr(module, attribute)
    if not callable(found):
        raise TypeError(f"{name} is a {type(found).__name__}, which cannot be called")
    return found


class Chat:
    """A conversation with the model of a sample's session. ``finish_reason``: the limit of the run that ended it.

    ``turn`` is the index of the last answer.
    """

    def __init__(self, task: Task, *messages: dict[str, Any], max_turns: int | None) -> None:
        self.task, self.messages, self.turns = task, list(messages), itertools.islice(itertools.count(), max_turns)
        self.finish_reason, self.rewards = "", list[tuple[int | None, str]]()

    async def answer(self, tools: list[dict[str, Any]] | None = None) -> dict[str, Any] | None:
        """The model's next message, which is kept; None after the last turn, or without room for another message."""
        self.turn: int | None = next(self.turns, None)
        if self.turn is None:
            self.finish_reason = "max_turns"
            return None
        try:
            reply = await called(self._post, {"tools": tools} if tools else {})
        except urllib.error.HTTPError as error:
            reason = error.read().decode(errors="replace")
            if error.code == BAD_REQUEST and any(message["role"] == "assistant" for message in self.messages):
                print(f"a conversation ends: {reason}", file=sys.stderr)
                self.finish_reason = "length" if "context_length_exceeded" in reason else ""
                return None
            raise RuntimeError(f"the model's endpoint answers {error.code}: {reason}") from None
        message: dict[str, Any] = reply["choices"][0]["message"]
        self.messages.append(message)
        return message

    def earned(self, reward: Any) -> None:
        self.rewards += [] if reward is None else [(self.turn, number("the reward of a step", reward))]

    def result(self) -> dict[str, Any]:
        """With the sum of the steps' rewards; without any the configured reward scores the sample."""
        total = sum(float(reward) for _, reward in self.rewards) if self.rewards else None
        return {"reward": total, "turn_rewards": self.rewards, "finish_reason": self.finish_reason}

    def _post(self, settings: dict[str, Any]) -> Any:
        body = json.dumps({"model": self.task.model, "messages": self.messages, **settings}).encode()
        headers = {"Authorization": f"Bearer {self.task.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.task.base_url}/chat/completions", body, headers)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the endpoint is on loopback
        with direct.open(request, timeout=self.task.timeout_s) as response:
            return json.load(response)


class WorkerKind:
    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        yield


class CodeKind(WorkerKind):
    def __init__(self, setup: dict[str, Any]) -> None:
        self.made = functools.partial(load(setup["path"] or setup["env"]), **setup["args"])
        self.max_turns = setup["max_turns"]


class AgentFunction(CodeKind):
    """A function of the user's that calls the endpoint itself; it returns what a reward function may, or None."""

    async def play(self, task: Task) -> dict[str, Any]:
        return {"reward": await called(self.made, task)}


class MultiTurn(CodeKind):
    """A class with ``reset`` and ``step``. The controller samples the answers, and keeps the tokens and rewards."""

    async def play(self, task: Task) -> dict[str, Any]:
        environment = await called(self.made)
        first = await called(environment.reset, task.sample)
        if not isinstance(first, (str, type(None))):
            raise TypeError(f"reset returned {type(first).__name__}, not a text or None")
        answer = await task.answer({"text": first or ""})
        while answer is not None:
            answer = await task.answer(await called(environment.step, answer))
        return {}


def finite(metrics: dict[str, Any]) -> dict[str, float]:
    """What is a number of ``metrics``: JSON has no NaN."""
    numbers = {str(name): number(f"metric {name}", value) for name, value in metrics.items() if value is not None}
    return {name: float(text) for name, text in numbers.items() if math.isfinite(float(text))}


def number(what: str, value: Any) -> str:
    """The text of a number, also of numpy's and torch's: JSON has no NaN."""
    if isinstance(value, (str, bytes, list, tuple, dict)):
        raise TypeError(f"{what} is of type {type(value).__name__}")
    return "inf" if abs(value) > sys.float_info.max else str(float(value))


def custom(setup: dict[str, Any]) -> Any:
    """A workflow of the user's; it needs this package."""
    module = importlib.import_module("areal_lora.rollout.custom_child")
    return module.CustomWorkflows(load(setup["path"]), setup["args"], setup["context"])


class Gym(CodeKind):
    """A class with gymnasium's ``reset`` and ``step``: texts are observations, answers are actions."""

    async def play(self, task: Task) -> dict[str, Any]:
        environment = await called(self.made)
        try:
            observation, _ = await called(environment.reset, seed=task.seed, options=vars(task.sample))
            chat, ended = Chat(task, max_turns=self.max_turns), False
            while not ended:
                chat.messages.append({"role": "user", "content": str(observation)})
                if (message := await chat.answer()) is None:
                    break
                observation, reward, done, cut, _ = await called(environment.step, message["content"] or "")
                chat.earned(reward)
                ended = done or cut
            return chat.result()
        finally:
            await called(getattr(environment, "close", lambda: None))


class Mcp(WorkerKind):
    """The servers' tools are the model's, until it answers without a call. The configured reward scores the answer."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.servers, self.max_turns = setup["env"], setup["max_turns"]
        importlib.import_module("mcp")

    async def play(self, task: Task) -> dict[str, Any]:
        async with AsyncExitStack() as stack:
            sessions, tools = dict[str, Any](), list[dict[str, Any]]()
            for server in self.servers:
                session = await stack.enter_async_context(_mcp_session(server))
                async for tool in _mcp_tools(session):
                    sessions[tool.name] = session
                    tools.append(_tool(tool.name, tool.description, tool.model_dump(by_alias=True)["inputSchema"]))
            prompt = task.sample.messages or [{"role": "user", "content": task.sample.prompt}]
            chat = Chat(task, *prompt, max_turns=self.max_turns)
            while (message := await chat.answer(tools)) is not None and message.get("tool_calls"):
                for call in message["tool_calls"]:
                    text = await _tool_text(sessions, call["function"])
                    chat.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            return {"finish_reason": chat.finish_reason}


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


async def _mcp_tools(session: Any) -> AsyncIterator[Any]:
    """The tools of all pages of a server's list; a page that repeats a cursor is the last one."""
    types, seen, page = importlib.import_module("mcp.types"), set[str](), await session.list_tools()
    while True:
        for tool in page.tools:
            yield tool
        cursor = page.model_dump(by_alias=True).get("nextCursor")
        if not cursor or cursor in seen:
            return
        seen.add(cursor)
        page = await session.list_tools(params=types.PaginatedRequestParams(cursor=cursor))


async def _tool_text(sessions: dict[str, Any], function: dict[str, str]) -> str:
    """What the tool returned, or why it was not called, for the model to read: texts, and the types of other parts."""
    try:
        arguments = json.loads(function["arguments"])
        if function["name"] not in sessions or not isinstance(arguments, dict):
            raise ValueError("no such tool, or its arguments are no object")
    except ValueError as error:
        return f"error: {error}"
    result = await sessions[function["name"]].call_tool(function["name"], arguments)
    return "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)


class OpenEnv(WorkerKind):
    """Sessions of an OpenEnv server, whose rewards are added up; without any the configured reward scores the sample.

    Observations are messages. An answer is the action's only field, or JSON with its fields. If actions are calls of
    tools, these are the model's, until it answers without a call.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self.client = importlib.import_module("openenv").GenericEnvClient
        self.closed = importlib.import_module("websockets").ConnectionClosed
        self.url, self.args, self.max_turns = setup["env"], setup["args"], setup["max_turns"]

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        with await called(urllib.request.urlopen, f"{self.url}/schema", timeout=60) as response:
            action = json.load(response)["action"]["properties"]
        self.fields = {name: field for name, field in action.items() if name not in ("metadata", "type")}
        yield

    @asynccontextmanager
    async def _session(self, task: Task) -> AsyncIterator[tuple[Any, Any]]:
        """A session and its first result, as soon as the server has room for one."""
        row = {"seed": task.seed, "prompt": task.sample.prompt, "answer": task.sample.answer}
        while True:
            async with self.client(base_url=self.url, message_timeout_s=task.timeout_s) as session:
                try:
                    first = await session.reset(**(row | self.args))
                except (RuntimeError, self.closed) as error:  # it may close before it answers
                    if isinstance(error, RuntimeError) and "CAPACITY_REACHED" not in str(error):
                        raise
                else:
                    yield session, first
                    return
            await asyncio.sleep(1)

    def _action(self, answer: str, call: dict[str, Any] | None) -> dict[str, Any]:
        """Raises ValueError where the answer is no JSON."""
        if call is not None:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            return {"type": "call_tool", "tool_name": name, "arguments": arguments}
        if len(self.fields) == 1:
            ((name, field),) = self.fields.items()
            return {name: answer if field.get("type") == "string" else json.loads(answer)}
        action = json.loads(answer)
        if not isinstance(action, dict):
            raise ValueError("no JSON object")
        return action

    async def play(self, task: Task) -> dict[str, Any]:
        async with self._session(task) as (session, result):
            tools, prompt = None, [{"role": "user", "content": _shown(result.observation)}]
            if "tool_name" in self.fields:
                listed = (await session.step({"type": "list_tools"})).observation["tools"]
                tools = [_tool(each["name"], each["description"], each["input_schema"]) for each in listed]
            if not prompt[0]["content"]:
                prompt = task.sample.messages or [{"role": "user", "content": task.sample.prompt}]
            chat = Chat(task, *prompt, max_turns=self.max_turns)
            while not result.done and (message := await chat.answer(tools)) is not None:
                calls = message.get("tool_calls") or [] if tools else [None]
                for call in calls:
                    reply: dict[str, Any] = {"role": "tool", "tool_call_id": call["id"]} if call else {"role": "user"}
                    try:
                        result = await session.step(self._action(message["content"] or "", call))
                        reply["content"] = _shown(result.observation)
                        chat.earned(result.reward)
                    except (ValueError, RuntimeError) as error:
                        if isinstance(error, RuntimeError) and "VALIDATION_ERROR" not in str(error):
                            raise
                        reply["content"] = f"error: {error}. Fields of an action: {', '.join(self.fields)}"
                    chat.messages.append(reply)
                if not calls:
                    break
            return chat.result()


def _shown(observation: dict[str, Any]) -> str:
    """A text field that is alone as it is, else the fields as JSON; empty without any."""
    fields = {k: v for k, v in observation.items() if k not in ("metadata", "done", "reward") and v is not None}
    (text, *others) = fields.values() or ("",)
    return text if not others and isinstance(text, str) else json.dumps(fields)


def _tool(name: str, description: str | None, parameters: dict[str, Any]) -> dict[str, Any]:
    """In the form of chat completions."""
    function = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": function}


class Verifiers(WorkerKind):
    """An environment of the package ``verifiers``: tasks, harness and rubric are its own.

    Its first tasks are those of the held-out rows, by their ranks ``held_out``; training rows have the others in turn.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self.api, self.held_out = importlib.import_module("verifiers.v1"), setup["held_out"]
        self.n_held_out = max(self.held_out.values(), default=-1) + 1
        chosen = setup["args"] | {"taskset": {**setup["args"].get("taskset", {}), "id": setup["env"]}}
        self.environment = self.api.load_environment(self.api.resolve_env_config(chosen))
        self.tasks, self.more, self.numbers = list[Any](), iter(self.environment.taskset), itertools.count()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Raises RuntimeError for a taskset without a task for training rows."""
        async with self.environment.serving():
            if self.environment.taskset.bounded:
                self.tasks += self.more
                if (n := len(self.tasks)) <= self.n_held_out:
                    raise RuntimeError(f"the taskset has {n} tasks, held-out rows are {self.n_held_out}: lower n_eval")
            yield

    def _task(self, uid: str) -> Any:
        index = self.held_out.get(uid, self.n_held_out + int(uid.rpartition("/")[2]))
        self.tasks += itertools.islice(self.more, max(0, index + 1 - len(self.tasks)))
        if index >= (n := len(self.tasks)):
            index = self.n_held_out + (index - n) % (n - self.n_held_out)
        return self.tasks[index]

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
            parts |= finite(rewards | trace.metrics)
        return {"reward": sum(trace.reward for trace in episode.traces) / len(episode.traces), "metrics": parts}


KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {"agent": AgentFunction, "custom": custom, "gym": Gym, "mcp": Mcp}
KINDS |= {"multi_turn": MultiTurn, "openenv": OpenEnv, "verifiers": Verifiers}
