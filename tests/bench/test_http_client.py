import asyncio
import json

import pytest

from livedraft.bench.http_client import StreamingClient
from livedraft.records import UserError

EVENTS = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "a"}}]},
    {"choices": [{"delta": {"content": "bc"}}]},
    {"choices": [], "usage": {"completion_tokens": 5}},
]


async def answered(events, *, closes_after_each=False, status="200 OK"):
    """Ask twice over one client, of a server that streams `events`; it may close the idle connection in between."""
    num_connections, gone = 0, asyncio.Event()

    async def serve(reader, writer):
        nonlocal num_connections
        num_connections += 1
        gone.clear()
        try:
            await stream(reader, writer)
        except asyncio.IncompleteReadError:
            pass  # the client has gone
        finally:
            writer.close()
            await writer.wait_closed()
            gone.set()

    async def stream(reader, writer):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length")).split()[1])
            await reader.readexactly(length)
            writer.write(f"HTTP/1.1 {status}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            for event in events:
                text = f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode()
                writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            if closes_after_each:
                return

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = StreamingClient(*server.sockets[0].getsockname()[:2])
    try:
        results = []
        for _ in range(2):
            results.append(await client.chat({"model": "m"}))
            await asyncio.sleep(0.05)
        return results, num_connections
    finally:
        await client.close()
        await asyncio.wait_for(gone.wait(), 10)  # or its socket is somebody else's warning, whenever it is collected
        server.close()


@pytest.mark.parametrize(("closes", "connections"), [(False, 1), (True, 2)])
def test_pieces_tokens_and_a_connection_that_was_closed_while_idle(closes, connections):
    results, num_connections = asyncio.run(answered(EVENTS, closes_after_each=closes))
    assert num_connections == connections
    for result in results:
        assert result.num_tokens == 5
        assert len(result.gaps) == 1
        assert result.first_seconds > 0


def test_refusals_and_broken_streams_are_one_sentence():
    with pytest.raises(UserError, match="429"):
        asyncio.run(answered(EVENTS, status="429 Too Many Requests"))
    with pytest.raises(UserError, match="without usage"):
        asyncio.run(answered(EVENTS[:2]))
