"""Takes promoted versions into service: a thread that looks at the registry, fills a spare draft off the loop, checks it,
and offers it to the engine, which flips over between two rounds."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from livedraft.drafts.registry import Registry
from livedraft.drafts.weights import file_sha256
from livedraft.engine.engine import Engine
from livedraft.events import Events
from livedraft.records import DraftVersion, UserError
from livedraft.speculation.draft_model import DraftModel

POLL_SECONDS = 0.25


class SwapWatcher:
    def __init__(
        self,
        engine: Engine,
        registry: Registry,
        *,
        route: str,
        build: Callable[[DraftVersion], DraftModel],
        events: Events,
        target_fingerprint: str,
        serving: str,
        after_look: Callable[[], None] = lambda: None,
    ) -> None:
        """`build` makes a resident draft of a version; `serving` is the version already resident; `after_look` runs on this
        thread after every look at the registry."""
        self._after_look = after_look
        self._engine, self._registry, self._route = engine, registry, route
        self._build, self._events = build, events
        self._target_fingerprint = target_fingerprint
        self._offered = serving
        self._refused: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="swap-watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _watch(self) -> None:
        torch.set_num_threads(1)  # this thread's own pool: filling a draft must not fight the engine for cores
        while not self._closing.wait(POLL_SECONDS):
            try:
                self.look()
                self._after_look()
            except Exception as error:  # a thread that dies silently would end all swaps
                self._events.emit("swap_failed", reason=f"{type(error).__name__}: {error}")

    def look(self) -> None:
        """Offer the version in service when it is another than the one offered last. Raises UserError as the registry."""
        version = self._registry.in_service(self._route)
        if version is None or version.id == self._offered or version.id in self._refused:
            return
        try:
            self._check(version)
            draft = self._build(version)
        except UserError as error:
            self._refused.add(version.id)
            self._events.emit("draft_refused", version=version.id, reason=str(error))
            return
        decision = next(row["decision"] for row in self._registry.versions(self._route) if row["id"] == version.id)
        self._engine.offer_draft(draft, prior=(decision or {}).get("alpha"))
        self._offered = version.id

    def _check(self, version: DraftVersion) -> None:
        if version.target_fingerprint != self._target_fingerprint:
            raise UserError(f"Version {version.id} was trained for another target ({version.target_fingerprint}).")
        path = self._registry.weights_path(version.id)
        try:
            found = file_sha256(path)
        except OSError as error:
            raise UserError(f"The weights of version {version.id} cannot be read ({error}).") from error
        if found != version.sha256:
            raise UserError(f"{path} does not match its checksum; the file is damaged.")
