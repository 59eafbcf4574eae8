"""A load generator's client: OpenAI's stream over one keep-alive socket, with as little work a token as possible.

It runs on the cores of the server it measures, so a general HTTP library's cost would be charged to the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

from livedraft.records import UserError


@dataclass(kw_only=True)
class Streamed:
    """One streamed completion: seconds to the first piece and between pieces, tokens by the server's own count."""

    first_seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0


class StreamingClient:
    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def chat(self, body: dict[str, Any]) -> Streamed:
        """Raises UserError when the server refuses."""
        payload = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n"
        )
        started = last = time.perf_counter()
        status = await self._ask(head.encode() + payload)
        if not status:  # the server had closed an idle connection
            await self.close()
            started = last = time.perf_counter()
            status = await self._ask(head.encode() + payload)
        assert self._reader is not None
        if b" 200 " not in status:
            raise UserError(f"The server answered {status.decode().strip()}.")
        result = Streamed()
        usage = b""
        while True:  # header lines, chunk sizes and data lines alike: only data lines matter
            line = await self._reader.readline()
            if line.startswith(b'data: {"'):
                if b'"content":"' in line and b'"content":""' not in line:
                    now = time.perf_counter()
                    if result.first_seconds:
                        result.gaps.append(now - last)
                    else:
                        result.first_seconds = now - started
                    last = now
                elif b'"choices":[]' in line:
                    usage = line
            elif line == b"0\r\n":
                await self._reader.readline()
                break
            elif not line:
                raise UserError("The server closed the connection in the middle of an answer.")
        if not usage:
            raise UserError("The server ended a stream without usage: the request failed there.")
        result.num_tokens = json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]
        return result

    async def _ask(self, request: bytes) -> bytes:
        """The answer's status line; empty when the connection was closed before."""
        if self._writer is None or self._reader is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        try:
            self._writer.write(request)
            return await self._reader.readline()
        except ConnectionError:
            return b""

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
        self._reader = self._writer = None
