"""Run environments and agents in a process of their own: ``python -I environment_child.py``, Python 3.10 or newer.

Messages are JSON after 4 bytes of length (big-endian), on the standard input and output that this process started with;
user code prints to standard error. `worker_process` has their types. Samples run at the same time in one event loop,
blocking code in threads, and may call the controller. A cancellation is answered at once, its sample when its last
thread has ended. At the end of its input the process ends its whole group, on another node than its controller's also
when nothing comes for ``silence_s``; there code calls an endpoint at a port of its own, whose connections are messages.
"""

import asyncio
import base64
import contextlib
import dataclasses
import errno
import functools
import importlib.util
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from urllib.parse import urlsplit

# By its file: in the folder of this script there are modules that hide those of others.
spec: Any = importlib.util.spec_from_file_location(
    "areal_lora_environment_kinds", Path(__file__).with_name("environment_kinds.py")
)
kinds: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kinds)

MAX_THREADS = 4096  # started as they are needed; blocking samples have one each
MEMORY_S = 1.0  # between two looks at the memory
MISTAKES = (ArithmeticError, AttributeError, ImportError, NameError, NotImplementedError, SyntaxError, TypeError)
"""Of code: another try fails in the same way."""
UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH)
MOST_LINKS = 8  # of a chain of causes, which may be a circle


def read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message; None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    message: dict[str, Any] = json.loads(stream.read(int.from_bytes(head, "big")))
    return message


def write(stream: BinaryIO, message: dict[str, Any]) -> None:
    body = json.dumps(message, ensure_ascii=False).encode(errors="replace")  # texts may have halves of surrogate pairs
    stream.write(len(body).to_bytes(4, "big") + body)
    stream.flush()


def failure(error: BaseException) -> dict[str, Any]:
    """The error for the parent; its traceback for the log."""
    traceback.print_exception(type(error), error, error.__traceback__)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    cause = "code" if isinstance(error, MISTAKES) else "other"
    link: BaseException | None = error  # libraries wrap the errors of their connections
    for _ in range(MOST_LINKS):
        if isinstance(link, (ConnectionError, socket.gaierror)) or getattr(link, "errno", 0) in UNREACHABLE:
            cause = "unreachable"
        link = link and (link.__cause__ or link.__context__)
    text = type(error).__name__
    with contextlib.suppress(Exception):  # fault boundary: the message is code of users, too
        text = f"{text}: {error}"
    return {"error": f"{text}{where}", "cause": cause}


def plain(reward: Any) -> Any:
    """What user code returned as a reward, or a named part of one, with texts for numbers."""
    if isinstance(reward, dict):
        return {str(name): plain(part) for name, part in reward.items()}
    return reward if reward is None or isinstance(reward, bool) else kinds.number("the reward", reward)


def turn(reply: Any) -> dict[str, Any]:
    """The fields of a `Reply`, or of a dict with them: another interpreter may not have that class."""
    if dataclasses.is_dataclass(reply) and not isinstance(reply, type):
        reply = dataclasses.asdict(reply)
    if not isinstance(reply, dict):
        raise TypeError(f"step returned {type(reply).__name__}, not a Reply")
    defaults: dict[str, Any] = {"text": "", "done": False, "reward": None, "role": "user", "metrics": {}}
    if unknown := sorted({*map(str, reply)} - {*defaults}):
        raise TypeError(f"step returned {', '.join(unknown)}, fields of a reply are {', '.join(defaults)}")
    fields = defaults | reply
    for name in ("text", "role"):
        if not isinstance(fields[name], str):
            raise TypeError(f"the reply's {name} is of type {type(fields[name]).__name__}")
    fields["done"] = bool(fields["done"])  # numpy's is no JSON
    fields["text"].encode()  # half a surrogate pair has no tokens
    if fields["reward"] is not None:
        fields["reward"] = kinds.number("the reply's reward", fields["reward"])
    fields["metrics"] = kinds.finite(fields["metrics"])
    return fields


def end_group() -> None:
    os.killpg(0, signal.SIGKILL)


def resident_bytes(pid: int) -> int:
    """Of a process and its descendants; pages that they share count in each. 0 for one that has ended."""
    size = 0
    with contextlib.suppress(OSError):  # it ends meanwhile
        place = Path("/proc", str(pid))
        size = int((place / "statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for children in place.glob("task/*/children"):
            size += sum(resident_bytes(int(child)) for child in children.read_text(encoding="ascii").split())
    return size


def bound_memory(most_gib: float, pipes: tuple[BinaryIO, BinaryIO]) -> None:
    """End the group when it has more: in another process, which code that holds the interpreter's lock cannot stop."""
    worker = os.getpid()
    if os.fork():
        return
    for pipe in pipes:
        os.close(pipe.fileno())
    while os.getppid() == worker:
        time.sleep(MEMORY_S)
        if (size := resident_bytes(worker)) > most_gib * 2**30:
            text = f"an environment worker has {size / 2**30:.2f} GiB, workflow.memory_gib is {most_gib:g}"
            print(f"{text}: it is started again", file=sys.stderr, flush=True)
            end_group()
    os._exit(0)


async def serve(setup: dict[str, Any], silence_s: float, requests: BinaryIO, replies: BinaryIO) -> None:
    loop, queue, heard = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]](), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(MAX_THREADS))
    running = dict[int, asyncio.Task[dict[str, Any]]]()
    calls, numbers = dict[int, asyncio.Future[Any]](), itertools.count(1)
    streams, ports = dict[int, asyncio.StreamWriter](), dict[int, int]()

    def receive() -> None:
        while (message := read(requests)) is not None:
            heard.set()
            loop.call_soon_threadsafe(queue.put_nowait, message)
        end_group()  # the parent has ended

    def expect() -> None:
        while heard.wait(silence_s):
            heard.clear()
        end_group()

    async def accept(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what code sends to the endpoint at ``port``; the answers come with the messages."""
        stream = next(numbers)
        streams[stream] = writer

        def send(data: bytes) -> None:
            message = {"type": "bytes", "stream": stream, "port": port}
            write(replies, {**message, "data": base64.b64encode(data).decode()})

        send(b"")  # opens it
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                send(data)
        send(b"")
        streams.pop(stream).close()

    async def reached(url: str) -> str:
        """``url``, of the controller's host, at a port of this one."""
        port = urlsplit(url).port or 0
        if port not in ports:
            server = await asyncio.start_server(functools.partial(accept, port), "127.0.0.1", 0)
            ports[port] = server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{ports[port]}/v1"

    async def call(number: int, body: Any) -> Any:
        """The controller's answer to ``body``, which sample ``number`` sends."""
        request = next(numbers)
        calls[request] = loop.create_future()
        message = {"type": "call", "number": number, "request": request}
        write(replies, {**message, "body": body})
        try:
            return await calls[request]
        except asyncio.CancelledError:
            write(replies, {**message, "body": None})
            raise
        finally:
            del calls[request]

    async def reply(number: int, given: Any) -> Any:
        return await call(number, turn(given))

    async def play(task: Any) -> dict[str, Any]:
        played = await environment.play(task)
        return {**played, "reward": plain(played.get("reward"))}

    def answer(number: int, ended: "asyncio.Task[dict[str, Any]]") -> None:
        del running[number]
        error = asyncio.CancelledError() if ended.cancelled() else ended.exception()
        played = ended.result() if error is None else failure(error)
        write(replies, {"type": "result", "number": number, **played})

    environment = await kinds.called(kinds.KINDS[setup["kind"]], setup)
    async with environment.opened():
        if silence_s:
            threading.Thread(target=expect, daemon=True).start()
        write(replies, {"type": "result", "number": 0})
        threading.Thread(target=receive, daemon=True).start()
        while True:
            message = await queue.get()
            if "stream" in message:
                if (writer := streams.get(message["stream"])) is not None:  # else its code has closed it
                    writer.write(base64.b64decode(message["data"])) if message["data"] else writer.close()
                continue
            number = message["number"]
            if "request" in message:
                if message["request"] in calls and not calls[message["request"]].done():
                    calls[message["request"]].set_result(message["answer"])
            elif message["task"] is not None:
                task = SimpleNamespace(**message["task"], call=functools.partial(call, number))
                task.answer = functools.partial(reply, number)
                task.sample = SimpleNamespace(**task.sample)
                if silence_s and "base_url" in message["task"]:
                    task.base_url = await reached(task.base_url)
                running[number] = asyncio.create_task(play(task))
                running[number].add_done_callback(functools.partial(answer, number))
            elif number:
                write(replies, {"type": "result", "number": 0})
                if number in running:  # else it has just been answered
                    running[number].cancel()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this process
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    setup = read(requests)
    if setup is not None:
        # Programs of the interpreter's environment come first, as after its `activate`.
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        sys.path += [folder for folder in setup["search_path"] if folder not in sys.path]
        if (most_gib := setup["settings"]["memory_gib"]) is not None:
            bound_memory(most_gib, (requests, replies))
        try:
            asyncio.run(serve(setup["settings"], setup["silence_s"], requests, replies))
        except Exception as error:  # fault boundary: code of users  # noqa: BLE001
            write(replies, {"type": "result", "number": 0, **failure(error)})


if __name__ == "__main__":
    main()
