"""Structured events: what happened, for the log, the demo's line and the tests. One emitter, any number of listeners."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("livedraft")
Event = dict[str, Any]


class Events:
    """Thread-safe fan-out. A listener that raises is dropped and named; it never harms serving."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Callable[[Event], None]] = []

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        with self._lock:
            self._listeners.append(listener)

    def emit(self, name: str, **fields: Any) -> None:
        event = {"event": name, "time": time.time(), **fields}
        logger.info("%s", json.dumps(event, default=str))
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("An event listener failed on %s and is dropped.", name)
                with self._lock:
                    self._listeners = [kept for kept in self._listeners if kept is not listener]
