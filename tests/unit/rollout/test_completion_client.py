from __future__ import annotations

import asyncio
import re
import tracemalloc
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from areal_lora.network.http_server import LEAVING_HEADER
from areal_lora.rollout.completion_client import (
    CompletionClient,
    CompletionRequest,
    FaultKind,
    GenerationFault,
    SampledChoice,
)
from areal_lora.rollout.routing import Router
from areal_lora.types import AdapterRef, Generation, Outcome, TokenColumns
from tests.support.clocks import Clock, seen
from tests.support.rollout.fake_server import FakeServer, Fault

V3 = AdapterRef(name="math", version=3)


async def ask(server: FakeServer, *, n: int = 2, timeout_s: float = 120.0) -> list[Generation]:
    server.models.add(str(V3))
    async with server:
        router = Router()
        router.announce(V3, {"server-0": server.url})
        async with CompletionClient(router, "secret") as client:
            try:
                return await client.sample(
                    V3,
                    CompletionRequest(prompt=[5, 6], n=n, max_tokens=8, temperature=0.7, top_p=0.9, seed=11),
                    timeout_s=timeout_s,
                )
            finally:
                assert router.servers["server-0"].outstanding == 0


def wanted(prompt: list[int], n: int) -> CompletionRequest:
    return CompletionRequest(prompt=prompt, n=n, max_tokens=8, temperature=1.0, top_p=1.0, seed=11)


def edited(edit: Callable[[dict[str, Any]], None], *, columns: bool = False) -> FakeServer:
    return FakeServer(fault=lambda _: Fault(edit=edit), columns=columns)


def spoil(**changed: Any) -> FakeServer:
    """Whose second answer has other columns."""
    arrays: dict[str, Any] = {"token_ids": [5, 6], "logprobs": [-0.5, -1.0], "versions": [3, 3]}
    made = msgspec.to_builtins(TokenColumns.of(*(arrays | changed).values()))
    return edited(lambda reply: reply["choices"][1].update(columns=made), columns=True)


def cut(reply: dict[str, Any]) -> None:
    reply["choices"][1]["columns"]["logprobs"] = ""


def unrouted(reply: dict[str, Any]) -> None:
    """Routes of the prompt, and of the first answer alone."""
    reply["choices"][0] |= {"prompt_routes": "AAAA"}
    reply["choices"][0]["columns"]["routes"] = "AAAA"


def test_request_and_answer() -> None:
    server = FakeServer()
    first, second = asyncio.run(ask(server))
    assert server.requests == [
        {
            "model": "math@v3",
            "prompt": [5, 6],
            "n": 2,
            "max_tokens": 8,
            "temperature": 0.7,
            "top_p": 0.9,
            "logprobs": 0,
            "return_token_ids": True,
            "return_columns": True,
            "seed": 11,
        }
    ]
    assert (first.token_ids, second.token_ids) == ([1000, 2], [1001, 2])
    assert first.logprobs == [-0.5, -1.0]
    assert first.columns.runs.tolist() == [[3, 2]]
    assert (first.text, first.finish_reason) == ("11", "stop")


def test_answers_without_the_ids_that_were_requested_are_refused() -> None:
    async def ask_kept() -> None:
        async with FakeServer(models={str(V3)}) as server:
            router = Router()
            router.announce(V3, {"server-0": server.url})
            async with CompletionClient(router, "secret") as client:
                request = msgspec.structs.replace(wanted([5, 6], 2), top_k=5, return_kept=True)
                await client.sample(V3, request, timeout_s=120.0)

    with pytest.raises(GenerationFault, match="truncated distribution without its ids") as caught:
        asyncio.run(ask_kept())
    assert caught.value.kind is FaultKind.PROTOCOL


def test_tokens_carry_the_version_that_the_server_says() -> None:
    answers = asyncio.run(ask(FakeServer(served_as=lambda _: "math@v2")))
    assert [a.columns.runs.tolist() for a in answers] == [[[2, 2]]] * 2


def test_an_answer_in_lists_is_the_same() -> None:
    assert asyncio.run(ask(FakeServer(columns=False))) == asyncio.run(ask(FakeServer()))


def swap(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda reply: reply["choices"][1].__setitem__(key, value)


@pytest.mark.parametrize(
    ("server", "kind"),
    [
        (FakeServer(fault=lambda _: Fault(status=503)), FaultKind.SERVER_ERROR),
        (FakeServer(fault=lambda _: Fault(status=429)), FaultKind.SERVER_ERROR),
        (FakeServer(fault=lambda _: Fault(status=404)), FaultKind.RETIRED),
        (FakeServer(fault=lambda _: Fault(status=400)), FaultKind.REJECTED),
        (FakeServer(fault=lambda _: Fault(disconnect=True)), FaultKind.CONNECTION),
        (FakeServer(delay_s=lambda _: 300.0), FaultKind.TIMEOUT),
        (FakeServer(served_as=lambda _: "other@v3"), FaultKind.PROTOCOL),
        (edited(lambda reply: reply["choices"].pop()), FaultKind.PROTOCOL),
        (edited(lambda reply: reply.pop("choices")), FaultKind.PROTOCOL),
        (edited(lambda reply: reply.update(model="base")), FaultKind.PROTOCOL),
        (edited(swap("index", 0)), FaultKind.PROTOCOL),
        (edited(swap("token_ids", [])), FaultKind.PROTOCOL),
        (edited(swap("token_ids", None)), FaultKind.PROTOCOL),
        (edited(swap("token_ids", [5, 2**31])), FaultKind.PROTOCOL),
        (edited(swap("logprobs", {"token_logprobs": [-0.5]})), FaultKind.PROTOCOL),
        (edited(swap("logprobs", {"token_logprobs": [-0.5, None]})), FaultKind.PROTOCOL),
        (edited(swap("versions", [3])), FaultKind.PROTOCOL),
        (edited(swap("versions", [-1, -1])), FaultKind.PROTOCOL),
        (spoil(token_ids=[], logprobs=[], versions=[]), FaultKind.PROTOCOL),
        (spoil(logprobs=[-0.5, float("nan")]), FaultKind.PROTOCOL),
        (spoil(versions=[3, -1]), FaultKind.PROTOCOL),
        (edited(cut, columns=True), FaultKind.PROTOCOL),
        (edited(unrouted, columns=True), FaultKind.PROTOCOL),
        (edited(swap("finish_reason", "abort")), FaultKind.ABORTED),
        (edited(swap("finish_reason", None)), FaultKind.ABORTED),
    ],
)
def test_whatever_goes_wrong_is_typed(server: FakeServer, kind: FaultKind) -> None:
    with pytest.raises(GenerationFault) as caught:
        asyncio.run(ask(server, timeout_s=0.3 if kind is FaultKind.TIMEOUT else 120.0))
    assert caught.value.kind is kind
    assert caught.value.outcome is not Outcome.OK
    assert caught.value.retryable == (kind is not FaultKind.REJECTED)


def test_a_request_on_a_server_that_is_given_up_fails_over_at_once() -> None:
    async def run() -> None:
        async with FakeServer(models={str(V3)}, delay_s=lambda _: 300.0) as hung:
            router = Router()
            router.announce(V3, {"server-0": hung.url})
            async with CompletionClient(router, "") as client:
                task = asyncio.create_task(client.sample(V3, wanted([1], n=1), timeout_s=120))
                while not hung.open_requests:
                    await asyncio.sleep(0.01)
                router.announce(V3, {"server-1": "http://127.0.0.1:9"}, lost=["server-0"])
                async with asyncio.timeout(60):
                    await task

    with pytest.raises(GenerationFault, match="excluded by the trainer") as caught:
        asyncio.run(run())
    assert caught.value.kind is FaultKind.CONNECTION
    assert caught.value.retryable


def test_a_deadline_of_the_client_says_nothing_about_the_server() -> None:
    async def run() -> None:
        async with FakeServer(models={str(V3)}, delay_s=lambda _: 300.0) as slow:
            router = Router()
            router.announce(V3, {"server-0": slow.url})
            async with CompletionClient(router, "") as client:
                with pytest.raises(GenerationFault, match="no answer within"):
                    await client.sample(V3, wanted([1], n=1), timeout_s=0.3)
            assert router.servers["server-0"].failures == 0

    asyncio.run(run())


def test_a_request_that_no_server_ever_got_says_nothing_about_the_answer() -> None:
    """All servers cool down until its deadline: a connection fault, after which the same answer is asked for."""

    async def run() -> None:
        router = Router(Clock())
        router.announce(V3, {"server-0": "http://127.0.0.1:9"})
        router.failed(router.servers["server-0"])
        async with CompletionClient(router, "") as client:
            await client.sample(V3, wanted([1], n=1), timeout_s=0.1)

    with pytest.raises(GenerationFault, match=r"no server was available within 0\.1 s") as caught:
        asyncio.run(run())
    assert caught.value.kind is FaultKind.CONNECTION


def test_a_server_that_is_not_there() -> None:
    async def run() -> None:
        async with FakeServer() as gone:
            url = gone.url
        router = Router()
        router.announce(V3, {"server-0": url})
        async with CompletionClient(router, "") as client:
            await client.sample(V3, wanted([1], n=1), timeout_s=120)

    with pytest.raises(GenerationFault) as caught:
        asyncio.run(run())
    assert caught.value.kind is FaultKind.CONNECTION


def test_a_cancelled_request_ends_on_the_server_too() -> None:
    async def run() -> int:
        async with FakeServer(models={str(V3)}, delay_s=lambda _: 300.0) as server:
            router = Router()
            router.announce(V3, {"server-0": server.url})
            async with CompletionClient(router, "") as client:
                task = asyncio.create_task(client.sample(V3, wanted([1], n=1), timeout_s=120))
                while not server.open_requests:
                    await asyncio.sleep(0.01)
                task.cancel()
                async with asyncio.timeout(120):
                    while server.open_requests:
                        await asyncio.sleep(0.01)
                assert router.servers["server-0"].outstanding == 0
                return server.open_requests

    assert asyncio.run(run()) == 0


def test_answers_come_in_the_order_of_their_numbers() -> None:
    async def run(server: FakeServer) -> list[SampledChoice]:
        async with server:
            router = Router()
            router.announce(V3, {"server-0": server.url})
            async with CompletionClient(router, "") as client:
                request = CompletionRequest(
                    prompt=[1], n=3, max_tokens=8, temperature=0.0, top_p=1.0, return_token_ids=True
                )
                return (await client.pinned().complete(V3, request, timeout_s=120))[1]

    def numbered(_: list[int], k: int) -> tuple[list[int], str]:
        return [7, 2], str(k)

    shuffled = FakeServer(
        models={str(V3)}, answer=numbered, fault=lambda _: Fault(edit=lambda reply: reply["choices"].reverse())
    )
    answers = asyncio.run(run(shuffled))
    assert [(a.text, len(a.token_ids or ()), a.finish_reason) for a in answers] == [(text, 2, "stop") for text in "012"]
    assert shuffled.requests[0]["temperature"] == 0.0
    assert "seed" not in shuffled.requests[0]
    with pytest.raises(GenerationFault, match="answered by math@v2"):
        asyncio.run(run(FakeServer(models={str(V3)}, served_as=lambda _: "math@v2")))


def test_what_a_leaving_server_hands_back_another_one_answers() -> None:
    """No fault, no cool-down: the group does not notice. Nothing more is sent to the server that leaves."""

    async def ask_both() -> None:
        handed_back = Fault(status=503, headers={LEAVING_HEADER: "1"})
        leaver, other = FakeServer(fault=lambda _: handed_back), FakeServer()
        async with leaver, other:
            for server in (leaver, other):
                server.models.add(str(V3))
            router = Router()
            router.announce(V3, {"server-0": leaver.url, "server-1": other.url})
            async with CompletionClient(router, "secret") as client:
                for _ in range(4):
                    answers = await client.sample(V3, wanted([5, 6], n=2), timeout_s=120.0)
                    assert len(answers) == 2
        assert (len(leaver.requests), len(other.requests)) == (1, 4)
        assert router.servers["server-0"].failures == 0

    asyncio.run(ask_both())


def test_a_leaving_server_that_breaks_off_hands_back_and_alone_it_is_no_server() -> None:
    async def alone() -> GenerationFault:
        def breaks_off(_: int) -> Fault:
            router.servers["server-0"].leaving = True
            return Fault(disconnect=True)

        leaver, router = FakeServer(fault=breaks_off), Router()
        async with leaver:
            leaver.models.add(str(V3))
            router.announce(V3, {"server-0": leaver.url})
            async with CompletionClient(router, "secret") as client:
                with pytest.raises(GenerationFault) as fault:
                    await client.sample(V3, wanted([5], n=1), timeout_s=1.0)
        assert router.servers["server-0"].failures == 0
        return fault.value

    # Counted as an outage, not as a failure of the group.
    fault = seen(lambda: asyncio.run(alone()), lambda fault: fault.kind is FaultKind.CONNECTION)
    assert "no server was available" in str(fault)


def test_a_conversation_whose_version_has_left_its_server_goes_on_with_the_newest() -> None:
    """The router learns it by the answer; a request of its own fails, as before."""
    newer = AdapterRef(name="math", version=4)

    async def run() -> None:
        async with FakeServer(models={str(V3)}) as server:
            router = Router(max_lag=1)
            router.announce(V3, {"server-0": server.url})
            async with CompletionClient(router, "secret") as client:
                conversation = client.conversation()
                await conversation.sample(conversation.newest(V3), wanted([5, 6], 1), timeout_s=20.0)
                server.models = {str(newer)}
                router.announce(newer, {"server-0": server.url})
                await conversation.sample(conversation.newest(V3), wanted([5, 6, 7], 1), timeout_s=20.0)
                assert [request["model"] for request in server.requests] == ["math@v3", "math@v3", "math@v4"]
                with pytest.raises(GenerationFault) as caught:
                    await client.sample(V3, wanted([5, 6], 1), timeout_s=20.0)
                assert caught.value.kind is FaultKind.RETIRED

    asyncio.run(run())


def test_a_conversation_whose_server_has_restarted_goes_on_where_its_version_is_still_held() -> None:
    """One of two has lost the version: its episodes would start again."""

    async def run() -> None:
        async with FakeServer(models={str(V3)}) as one, FakeServer(models={str(V3)}) as other:
            router, both = Router(), (one, other)
            router.announce(V3, {"server-0": one.url, "server-1": other.url})
            async with CompletionClient(router, "secret") as client:
                conversation = client.conversation()
                await conversation.sample(V3, wanted([5, 6], 1), timeout_s=120.0)
                (its,) = [server for server in both if server.requests]
                (rest,) = [server for server in both if not server.requests]
                its.models.clear()
                await conversation.sample(V3, wanted([5, 6, 7], 1), timeout_s=120.0)
                assert [request["prompt"] for request in rest.requests] == [[5, 6, 7]]
                rest.models.clear()
                with pytest.raises(GenerationFault) as caught:
                    await conversation.sample(V3, wanted([5, 6, 7, 8], 1), timeout_s=120.0)
                assert caught.value.kind is FaultKind.RETIRED

    asyncio.run(run())


class SlowServer:
    """Reads a request of any size, keeps nothing of it, and answers when it is told to."""

    def __init__(self) -> None:
        self.read, self.answer = asyncio.Event(), asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        left = int(re.findall(rb"Content-Length: (\d+)", head)[0])  # chunks would be written and read one by one
        while left:
            left -= len(await reader.read(1 << 14))
        self.read.set()
        await self.answer.wait()
        writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()


def test_a_waiting_request_keeps_four_bytes_of_a_prompts_token() -> None:
    n = 200_000

    async def main() -> int:
        slow, router = SlowServer(), Router()
        async with await asyncio.start_server(slow, "127.0.0.1", 0) as server, CompletionClient(router, "s") as client:
            port = server.sockets[0].getsockname()[1]
            router.announce(V3, {"server-0": f"http://127.0.0.1:{port}"})
            tracemalloc.start()
            request = msgspec.structs.replace(wanted([], 1), prompt=array("i", range(100_000, 100_000 + n)))
            task = asyncio.create_task(client.sample(V3, request, timeout_s=120.0))
            await asyncio.wait([task, reading := asyncio.create_task(slow.read.wait())], return_when="FIRST_COMPLETED")
            assert reading.done(), task.exception()
            kept, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            slow.answer.set()
            with pytest.raises(GenerationFault, match="HTTP 503"):
                await task
            return kept

    assert 4 * n <= asyncio.run(main()) < 5 * n
