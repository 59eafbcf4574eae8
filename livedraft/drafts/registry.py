"""Versions of drafts on disk, and which one serves each route. Folders and manifests are truth; the database can be rebuilt.

    <state>/drafts/<version id>/manifest.json, draft.safetensors
    <state>/drafts/in_service.json    the version in service by route
    <state>/livedraft.db              table `versions`, one row a version

A version's life: candidate -> rejected by the gate, or canary -> in_service or rolled_back by the watch -> retired. One from
elsewhere is imported until an operator promotes it; a damaged folder is set_aside. Called by the trainer (publish,
start_canary, reject) and by the engine's swap thread; never from the engine thread.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError

from livedraft.drafts.database import open_database, read_status
from livedraft.drafts.weights import DamagedDraftError, DraftWeights, file_sha256, load_draft
from livedraft.records import DEFAULT_ROUTE, DraftVersion, UserError

WEIGHTS_NAME, MANIFEST_NAME, POINTER_NAME = "draft.safetensors", "manifest.json", "in_service.json"
ROUTING_STATUS = "routing"
"""The status row in which the trainer says which route's draft serves which stream."""
NUM_KEPT_VERSIONS = 6
"""Folders of replaced versions that stay on disk, the newest of each route; rows and their numbers stay for good."""


class Registry:
    def __init__(self, state: Path) -> None:
        self.state = state
        self.drafts_folder = state / "drafts"

    # --- making and deciding ----------------------------------------------------------------------------------------

    def publish(self, save: Callable[[Path], str], version: DraftVersion, status: str = "candidate") -> DraftVersion:
        """Write a version under a temporary name, fsync, rename, then add its row. `save` writes the weights file and
        returns its sha256. A crash leaves either nothing or a whole version. Raises UserError on a full disk."""
        temporary = self.drafts_folder / f".tmp-{uuid.uuid4().hex}"
        try:
            self.drafts_folder.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            version = replace(version, sha256=save(temporary / WEIGHTS_NAME))
            (temporary / MANIFEST_NAME).write_text(json.dumps(asdict(version), indent=2), encoding="utf-8")
            for name in (WEIGHTS_NAME, MANIFEST_NAME):
                fsync_path(temporary / name)
            os.rename(temporary, self.folder(version.id))
            fsync_path(self.drafts_folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(f"A draft version could not be stored in {self.drafts_folder}: {error}.") from error
        try:
            with open_database(self.state) as database:
                _add_row(database, version, status)
        except UserError:
            shutil.rmtree(self.folder(version.id), ignore_errors=True)
            raise
        if status == "in_service":
            self._point_to(version.id, version.route)
        return version

    def reject(self, version_id: str, decision: dict[str, Any]) -> None:
        """By the gate. A version that an operator has put into service meanwhile stays there."""
        with open_database(self.state) as database:
            is_rejected = _decide(database, version_id, "rejected", decision, only_from=("candidate",))
        if is_rejected:
            shutil.rmtree(self.folder(version_id), ignore_errors=True)  # the row and its numbers stay

    def reject_candidates(self, route: str) -> None:
        """Those that nobody will test any more."""
        with open_database(self.state) as database:
            rows = database.execute(
                "SELECT id FROM versions WHERE route = ? AND status = 'candidate' AND parent IS NOT NULL"
                " AND json_extract(manifest, '$.num_requests_seen') > 0",
                (route,),
            ).fetchall()
        for (version_id,) in rows:
            self.reject(version_id, {"reason": "training ended before its test"})

    def start_canary(self, version_id: str, decision: dict[str, Any]) -> None:
        """The gate let it through; the watch decides whether it stays."""
        with open_database(self.state) as database:
            _decide(database, version_id, "canary", decision, only_from=("candidate",))

    def withdraw(self, version_id: str, reason: dict[str, Any], status: str = "rolled_back") -> bool:
        """A canary, or a version that cannot be read, leaves; what is in service stays. False when it is in service by now."""
        with open_database(self.state) as database:
            return _decide(database, version_id, status, reason, only_from=("candidate", "canary", "retired"))

    def note(self, version_id: str, numbers: dict[str, Any]) -> None:
        """Numbers for the record of a version, whatever its status."""
        with open_database(self.state) as database:
            database.execute(
                "UPDATE versions SET decision = json_patch(coalesce(decision, '{}'), ?) WHERE id = ?",
                (json.dumps(numbers), version_id),
            )

    def serve(
        self,
        version_id: str,
        route: str,
        reason: dict[str, Any],
        *,
        status_of_current: str = "retired",
        only_from: tuple[str, ...] | None = None,
    ) -> DraftVersion:
        """This version from now on: a canary that showed no harm, or an operator's word. One transaction, so a reader
        sees exactly one in service.

        Raises UserError for one that is not on disk or of another route, or whose status is none of `only_from` any more.
        """
        if not self.weights_path(version_id).exists():
            raise UserError(f"There is no version {version_id!r} in {self.drafts_folder}; see `livedraft drafts list`.")
        with open_database(self.state) as database:
            row = database.execute(
                "SELECT manifest, route, status FROM versions WHERE id = ?", (version_id,)
            ).fetchone()
            if row is None or row[1] != route:
                raise UserError(f"Version {version_id} does not belong to route {route}.")
            if only_from is not None and row[2] not in only_from:
                raise UserError(f"Version {version_id} is {row[2]} by now.")
            database.execute(
                "UPDATE versions SET status = ?, decided_at = ? WHERE route = ? AND status = 'in_service' AND id != ?",
                (status_of_current, time.time(), route, version_id),
            )
            _decide(database, version_id, "in_service", reason)
        self._point_to(version_id, route)
        self._prune(route)
        return DraftVersion(**json.loads(row[0]))

    def roll_back(self, route: str, reason: dict[str, Any]) -> DraftVersion:
        """Put the version that served last before the one in service back. Raises UserError when there is none on disk."""
        current = self.in_service(route)
        with open_database(self.state) as database:
            retired = database.execute(
                "SELECT id FROM versions WHERE route = ? AND status = 'retired' ORDER BY decided_at DESC, rowid DESC",
                (route,),
            ).fetchall()
        before = next((version_id for (version_id,) in retired if self.weights_path(version_id).exists()), None)
        if current is None or before is None:
            raise UserError(f"Route {route} has no earlier version to go back to.")
        self.note(current.id, reason)  # its numbers say why it left
        return self.serve(before, route, {}, status_of_current="rolled_back")

    def close_route(self, route: str, reason: dict[str, Any]) -> None:
        """Nothing is in service there any more: the default route's draft takes its requests. Raises UserError for that one."""
        if route == DEFAULT_ROUTE:
            raise UserError("The default route cannot be closed: its draft serves whatever no other route does.")
        with open_database(self.state) as database:
            for version_id, status in database.execute(
                "SELECT id, status FROM versions WHERE route = ? AND status IN ('in_service', 'canary', 'candidate')",
                (route,),
            ).fetchall():
                _decide(database, version_id, "retired" if status == "in_service" else "rejected", reason)
        self._point_to(None, route)
        self._prune(route)

    def undo_trial(self, new_id: str, old_id: str, route: str, numbers: dict[str, Any], *, is_canary: bool) -> None:
        """The watch found the new version worse: a canary leaves, what serves already gives way to the old one."""
        if is_canary:
            self.withdraw(new_id, numbers)
            return
        self.note(new_id, numbers)
        self.serve(old_id, route, {}, status_of_current="rolled_back")

    def set_aside(self, version_id: str, reason: str) -> None:
        """A folder that cannot be used is kept under another name, for whoever wants to look."""
        folder = self.folder(version_id)
        if folder.exists():
            os.replace(folder, folder.with_name(f"{version_id}.damaged-{uuid.uuid4().hex[:6]}"))
        with open_database(self.state) as database:
            _decide(database, version_id, "set_aside", {"set_aside": reason})

    def _prune(self, route: str) -> None:
        """Folders of versions that left service long ago."""
        with open_database(self.state) as database:
            old = database.execute(
                "SELECT id FROM versions WHERE route = ? AND status IN ('retired', 'rolled_back')"
                " ORDER BY decided_at DESC, rowid DESC LIMIT -1 OFFSET ?",
                (route, NUM_KEPT_VERSIONS),
            ).fetchall()
        for (version_id,) in old:
            shutil.rmtree(self.folder(version_id), ignore_errors=True)

    def _point_to(self, version_id: str | None, route: str) -> None:
        """Beside the folders, for a database that has to be rebuilt. A full disk costs the pointer, not the promotion."""
        try:
            pointers = {**self._pointers(), route: version_id}
            pointers = {name: pointed for name, pointed in pointers.items() if pointed is not None}
            temporary = self.drafts_folder / f".{POINTER_NAME}.{uuid.uuid4().hex}"
            temporary.write_text(json.dumps(pointers), encoding="utf-8")
            fsync_path(temporary)
            os.replace(temporary, self.drafts_folder / POINTER_NAME)
        except OSError:
            return

    def _pointers(self) -> dict[str, str]:
        try:
            pointers = json.loads((self.drafts_folder / POINTER_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return pointers if isinstance(pointers, dict) else {}

    # --- after a crash ----------------------------------------------------------------------------------------------

    def reconcile(self) -> list[str]:
        """For the owner of the folder, at start: leftovers of a crash go, whole versions without a row get one, and a route
        without a version in service gets the one the pointer names. Returns the ids found again."""
        if not self.drafts_folder.exists():
            return []
        for leftover in [*self.drafts_folder.glob(".tmp-*"), *self.drafts_folder.glob(f".{POINTER_NAME}.*")]:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        found = []
        pointers = self._pointers()
        with open_database(self.state) as database:
            known = {row[0] for row in database.execute("SELECT id FROM versions").fetchall()}
            for path in sorted(self.drafts_folder.glob(f"*/{MANIFEST_NAME}")):
                version = _read_manifest(path)
                if version is None or version.id != path.parent.name or version.id in known:
                    continue
                _add_row(database, version, "retired")
                found.append(version.id)
            for route, version_id in pointers.items():
                database.execute(
                    "UPDATE versions SET status = 'in_service' WHERE id = ? AND route = ? AND NOT EXISTS"
                    " (SELECT 1 FROM versions WHERE route = ? AND status = 'in_service')",
                    (version_id, route, route),
                )
        return found

    # --- reading ----------------------------------------------------------------------------------------------------

    def routes(self) -> list[str]:
        """Those with a draft in service, the oldest first."""
        with open_database(self.state) as database:
            rows = database.execute(
                "SELECT route FROM versions GROUP BY route HAVING max(status = 'in_service') ORDER BY min(rowid)"
            ).fetchall()
        return [route for (route,) in rows]

    def assignments(self) -> dict[str, str]:
        """Streams that another route's draft serves, by what the trainer has found (`learning/routing.py`)."""
        found = read_status(self.state, ROUTING_STATUS).get("assignments", {})
        return {str(stream): str(route) for stream, route in found.items()}

    def in_service(self, route: str) -> DraftVersion | None:
        return self._newest(route, "in_service")

    def canary(self, route: str) -> DraftVersion | None:
        """The version on trial."""
        return self._newest(route, "canary")

    def _newest(self, route: str, status: str) -> DraftVersion | None:
        with open_database(self.state) as database:
            row = database.execute(
                "SELECT manifest FROM versions WHERE route = ? AND status = ? ORDER BY rowid DESC", (route, status)
            ).fetchone()
        return None if row is None else DraftVersion(**json.loads(row[0]))

    def versions(self, route: str | None = None) -> list[dict[str, Any]]:
        """All rows, oldest first: id, route, status, decision."""
        with open_database(self.state) as database:
            rows = database.execute(
                "SELECT id, route, status, created_at, decided_at, decision FROM versions"
                " WHERE ? IS NULL OR route = ? ORDER BY rowid",
                (route, route),
            ).fetchall()
        names = ("id", "route", "status", "created_at", "decided_at")
        return [
            {**dict(zip(names, row, strict=False)), "decision": json.loads(row[5]) if row[5] else None} for row in rows
        ]

    def version(self, version_id: str) -> dict[str, Any]:
        """One row. Raises UserError for an id that was never there."""
        for row in self.versions():
            if row["id"] == version_id:
                return row
        raise UserError(f"There is no version {version_id!r}; see `livedraft drafts list`.")

    def load(self, version: DraftVersion) -> DraftWeights:
        """The weights as they were published. Raises UserError when they are missing, damaged or no numbers."""
        path = self.weights_path(version.id)
        try:
            found = file_sha256(path)
        except OSError as error:
            raise DamagedDraftError(f"The weights of version {version.id} cannot be read ({error}).") from error
        if found != version.sha256:
            raise DamagedDraftError(f"{path} does not match its checksum; the file is damaged.")
        weights = load_draft(path)
        for name, tensor in weights.tensors.items():
            if not bool(tensor.isfinite().all()):
                raise DamagedDraftError(f"Version {version.id} holds values that are no numbers (in {name}).")
        return weights

    def manifest(self, version_id: str) -> dict[str, Any]:
        """As the version's folder or, for a rejected one, the database has it."""
        with open_database(self.state) as database:
            row = database.execute("SELECT manifest FROM versions WHERE id = ?", (version_id,)).fetchone()
        manifest: dict[str, Any] = json.loads(row[0]) if row else {}
        return manifest

    def folder(self, version_id: str) -> Path:
        return self.drafts_folder / version_id

    def weights_path(self, version_id: str) -> Path:
        return self.folder(version_id) / WEIGHTS_NAME


def _add_row(database: sqlite3.Connection, version: DraftVersion, status: str) -> None:
    database.execute(
        "INSERT INTO versions (id, route, parent, status, created_at, manifest) VALUES (?, ?, ?, ?, ?, ?)",
        (version.id, version.route, version.parent, status, version.created_at, json.dumps(asdict(version))),
    )


def _decide(
    database: sqlite3.Connection,
    version_id: str,
    status: str,
    numbers: dict[str, Any],
    *,
    only_from: tuple[str, ...] | None = None,
) -> bool:
    """The gate's numbers, the watch's and an operator's word gather in one record. With `only_from` nothing happens, and the
    answer is False, when somebody else has decided first: trainer, watch and operator are three processes."""
    marks = ", ".join("?" * len(only_from)) if only_from else ""
    changed = database.execute(
        "UPDATE versions SET status = ?, decided_at = ?, decision = json_patch(coalesce(decision, '{}'), ?) WHERE id = ?"
        + (f" AND status IN ({marks})" if only_from else ""),
        (status, time.time(), json.dumps(numbers), version_id, *(only_from or ())),
    ).rowcount
    assert changed == 1 or only_from, f"unknown version {version_id}"
    return changed == 1


def _read_manifest(path: Path) -> DraftVersion | None:
    try:
        return DraftVersion(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def new_version_id(number: int) -> str:
    """Readable in a table, unique across restarts."""
    return f"v{number:04d}-{uuid.uuid4().hex[:6]}"


def lock_state(state: Path) -> TextIO:
    """One process owns a state folder; the lock goes with it."""
    file = None
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)  # traces hold what people wrote
        file = (state / "lock").open("w")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if file is not None:
            file.close()
        if isinstance(error, BlockingIOError):
            raise UserError(f"Another livedraft is using {state}; stop it or give another --state.") from error
        raise UserError(f"The state folder {state} cannot be used ({error.strerror}); give another --state.") from error
    return file


def fsync_path(path: Path) -> None:
    """Flush a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
