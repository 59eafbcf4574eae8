"""From the engine's thread to the event loop: one wake-up a round, however many requests moved in it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from livedraft.records import Update


class Queue(asyncio.Queue[tuple[int, Update | None, float]]):
    """(choice, update, when it was made) of one job; None instead of an update: time is up."""

    def __init__(self, on_finish: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.on_finish = on_finish


class Handover:
    """`deliver` is called from any thread; queues are filled on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: deque[tuple[Queue, int, Update, float]] = deque()
        self._is_scheduled = False

    def deliver(self, queue: Queue, index: int, update: Update) -> None:
        """Raises RuntimeError when the event loop is gone."""
        # The time is taken here: a client that reads slowly must not count as a slow server.
        self._pending.append((queue, index, update, time.perf_counter()))
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        self._is_scheduled = False  # before emptying: what comes from now on schedules anew
        while self._pending:
            queue, index, update, made_at = self._pending.popleft()
            queue.put_nowait((index, update, made_at))
            if update.finish_reason is not None:
                queue.on_finish()
