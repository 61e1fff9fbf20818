from __future__ import annotations

import asyncio

import pytest

from areal_lora.rollout.channel.tunnel import StreamBytes, Tunnel


@pytest.mark.parametrize("given", [True, False])
def test_the_other_process_reaches_the_ports_that_it_was_given_alone(given: bool) -> None:
    """Its code may name any port of this host."""
    connections, sent = list[bytes](), list[StreamBytes]()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(await reader.read(5))
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        tunnel = Tunnel(sent.append, {port} if given else {port + 1})
        for data in (b"", b"hello"):
            tunnel.receive(StreamBytes(stream=1, port=port, data=data))
        while not sent:
            await asyncio.sleep(0.01)
        tunnel.close()
        server.close()

    asyncio.run(main())
    assert connections == [b"hello"] * given
    assert [each.data for each in sent] == [b""], "it has ended"
