"""What many conversations at once cost the controller.

``python benchmarks/many_sessions.py [SESSIONS] [SECONDS] [TOKENS] [DELAY]``: agents in a worker process
hold SESSIONS conversations over HTTP, each with TOKENS tokens from its first turn on. A stand-in engine in another
process answers each request after DELAY seconds. For SECONDS after the first turn of all:

- callbacks of the event loop in CPU time of its thread, which neighbours on the machine do not lengthen
- iterations of the loop, of the callbacks that are due at once: more with neighbours
- delay of a timer by the clock
- CPU time and resident memory of the controller, by minute
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SAID = "a" * 156
"""With the marks of a message a turn is 320 tokens: 32 k in 100 turns."""
TURNS = 100


async def agent(task: Any) -> float:
    """In the worker. The first message makes the conversation as long as it is after many turns."""
    messages = [{"role": "user", "content": "a" * int(os.environ["START_TOKENS"])}]
    headers = {"Authorization": f"Bearer {task.api_key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as session:
        for _ in range(TURNS):
            body = {"model": task.model, "messages": messages}
            async with session.post(f"{task.base_url}/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                reply = await response.json()
            messages += [reply["choices"][0]["message"], {"role": "user", "content": SAID}]
    return 1.0


class Forgetful(list[Any]):
    def append(self, _: Any) -> None:
        pass


async def engine(delay_s: float) -> None:
    from areal_lora.data.prompts import load_tokenizer
    from tests.support.rollout.fake_server import FakeServer

    tokenizer = load_tokenizer(str(ROOT / "examples" / "math" / "tiny_model"))
    answer = [*tokenizer.encode(SAID, add_special_tokens=False), tokenizer.eos_token_id]
    fake = FakeServer(models={"math@v1"}, answer=lambda *_: (answer, SAID), delay_s=lambda _: delay_s)
    fake.requests = Forgetful()
    async with fake:
        print(fake.url, flush=True)
        await asyncio.Event().wait()


class TimedLoop(asyncio.SelectorEventLoop):
    """Keeps the CPU seconds of each iteration and of each callback."""

    def __init__(self) -> None:
        super().__init__()
        self.iterations, self.callbacks = list[float](), list[float]()
        call: Any = asyncio.Handle._run  # type: ignore[attr-defined]

        def timed(handle: asyncio.Handle) -> None:
            start = time.thread_time()
            call(handle)
            self.callbacks.append(time.thread_time() - start)

        asyncio.Handle._run = timed  # type: ignore[attr-defined]

    def _run_once(self) -> None:
        start = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.iterations.append(time.thread_time() - start)


def percentiles(values: list[float], *, over_s: float | None = None) -> str:
    """Of the values; with ``over_s`` of what an event meets that comes at any moment of so many seconds."""
    ordered = np.sort(np.array(values))
    longer = np.cumsum(ordered[::-1])[::-1] / over_s if over_s else np.arange(len(ordered), 0, -1) / len(ordered)
    p50, p99 = (float(ordered[longer <= 1 - share].min(initial=ordered[-1])) for share in (0.5, 0.99))
    shown = (0.0 if over_s and longer[0] < 0.5 else p50, p99, float(ordered[-1]))
    return "p50 {:.1f}, p99 {:.1f}, max {:.1f} ms".format(*(1e3 * value for value in shown))


async def delays(seen: list[float]) -> None:
    """Of timers; garbage is collected as in the controller."""
    from areal_lora.processes.startup import rare_full_collections

    with rare_full_collections() as collect:
        while True:
            collect()
            due = time.monotonic() + 0.01
            await asyncio.sleep(0.01)
            seen.append(time.monotonic() - due)


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


async def controller(url: str, sessions: int, seconds: int, loop: TimedLoop) -> None:
    from areal_lora.config.models import SamplingConfig, WorkerWorkflowConfig
    from areal_lora.data.prompts import Formatter, Prompt, load_tokenizer
    from areal_lora.processes.startup import collector_paused
    from areal_lora.rollout.agents import AgentWorkflow, agent_gateway
    from areal_lora.rollout.completion_client import CompletionClient
    from areal_lora.rollout.custom_child import ContextFields
    from areal_lora.rollout.environment_workers import EnvironmentWorkers
    from areal_lora.rollout.routing import Router
    from areal_lora.rollout.workflow import WorkflowContext
    from areal_lora.types import AdapterRef, Sample

    ref, router, n_turns = AdapterRef(name="math", version=1), Router(), 0
    router.announce(ref, {"server-0": url})

    class Counted(CompletionClient):
        async def sample(self, *arguments: Any, **keywords: Any) -> Any:
            nonlocal n_turns
            found = await super().sample(*arguments, **keywords)
            n_turns += 1
            return found

    model = str(ROOT / "examples" / "math" / "tiny_model")
    with collector_paused():
        tokenizer = load_tokenizer(model)
    sampling = SamplingConfig(prompts_per_step=1, n_samples=8, max_new_tokens=512, timeout_s=1e6)
    chosen = WorkerWorkflowConfig(path=f"{Path(__file__).resolve()}:agent")
    fields = ContextFields(model=model, format={}, sampling={}, max_model_len=1 << 20, streams=True)
    prompt = Prompt(uid="0:s", position=0, sample=Sample(uid="s", prompt="?", answer=""), text="?", token_ids=[1])
    async with (
        Counted(router, "secret") as client,
        agent_gateway() as opened,
        EnvironmentWorkers(chosen, fields) as workers,
        asyncio.TaskGroup() as tasks,
    ):
        scorer: Any = None
        context = WorkflowContext(
            client=client,
            scorer=scorer,
            sampling=sampling,
            formatter=Formatter(tokenizer=tokenizer),
            max_model_len=1 << 20,
        )
        workflow = AgentWorkflow(context=context, sessions=opened, agent=workers.play)
        running = [tasks.create_task(workflow.run(prompt, ref, i)) for i in range(sessions // sampling.n_samples)]
        while n_turns < sessions:
            await asyncio.sleep(1.0)
        print(f"{sessions} conversations, {resident_mb():.0f} MB after their first turn", flush=True)
        loop.iterations.clear()
        loop.callbacks.clear()
        late = list[float]()
        running.append(tasks.create_task(delays(late)))  # type: ignore[arg-type]
        begun, cpu_s, first = time.monotonic(), time.process_time(), n_turns
        while (passed := time.monotonic() - begun) < seconds:
            await asyncio.sleep(min(60.0, seconds - passed))
            used, done = time.process_time() - cpu_s, n_turns - first
            print(
                f"{time.monotonic() - begun:5.0f} s: {done} turns, {used / max(1, done) * 1e3:.1f} ms CPU a turn, "
                f"{resident_mb():.0f} MB",
                flush=True,
            )
        print("callbacks of the loop, CPU:", percentiles(loop.callbacks))
        print("iterations of the loop, CPU, over time:", percentiles(loop.iterations, over_s=passed))
        print("delay of a timer, clock:", percentiles(late), flush=True)
        for task in running:
            task.cancel()


def main(sessions: int = 2000, seconds: int = 300, tokens: int = 16_384, delay_s: int = 20) -> None:
    os.environ["START_TOKENS"] = str(tokens)
    command = [sys.executable, __file__, "engine", str(delay_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        try:
            with asyncio.Runner(loop_factory=TimedLoop) as runner:
                loop: Any = runner.get_loop()
                runner.run(controller(served.stdout.readline().strip(), sessions, seconds, loop))
        finally:
            served.kill()


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        asyncio.run(engine(float(sys.argv[2])))
    else:
        main(*map(int, sys.argv[1:]))
