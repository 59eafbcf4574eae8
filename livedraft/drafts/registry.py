"""Versions of drafts on disk, and which one serves each route. Folders and manifests are truth; the database can be rebuilt.

    <state>/drafts/<version id>/manifest.json, draft.safetensors
    <state>/livedraft.db          table `versions`: status candidate | in_service | retired | rejected

Called by the trainer (publish, promote, reject) and by the engine's swap thread (in_service); never from the engine
thread.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from livedraft.records import DraftVersion, UserError

DATABASE_NAME = "livedraft.db"
WEIGHTS_NAME, MANIFEST_NAME = "draft.safetensors", "manifest.json"

# One script a schema version: a fresh database runs them all, an older one what it lacks.
_MIGRATIONS = (
    """
CREATE TABLE IF NOT EXISTS versions (
    id TEXT PRIMARY KEY, route TEXT NOT NULL, parent TEXT, status TEXT NOT NULL, created_at REAL NOT NULL,
    decided_at REAL, manifest TEXT NOT NULL, decision TEXT);
CREATE TABLE IF NOT EXISTS traces (
    id INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL, route TEXT NOT NULL, created_at REAL NOT NULL,
    is_held_out INTEGER NOT NULL, shard TEXT NOT NULL, row INTEGER NOT NULL, num_output_tokens INTEGER NOT NULL,
    draft_version TEXT NOT NULL, alpha REAL, alpha_served REAL);
CREATE TABLE IF NOT EXISTS trainer_status (
    only INTEGER PRIMARY KEY CHECK (only = 1), updated_at REAL NOT NULL, status TEXT NOT NULL);
""",
    """
DROP TABLE trainer_status;
CREATE TABLE status (name TEXT PRIMARY KEY, updated_at REAL NOT NULL, fields TEXT NOT NULL);
CREATE TABLE controls (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
ALTER TABLE traces ADD COLUMN client_key TEXT NOT NULL DEFAULT '';

CREATE INDEX traces_by_client ON traces (client_key);
""",
)
DATABASE_SCHEMA_VERSION = len(_MIGRATIONS)


@contextmanager
def open_database(state: Path) -> Iterator[sqlite3.Connection]:
    """A short-lived connection: WAL, busy timeout, one transaction. Raises UserError for another schema or a full disk."""
    try:
        state.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(state / DATABASE_NAME, timeout=10.0)
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"The state folder {state} cannot be used ({error}); give another with --state.") from error
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version < DATABASE_SCHEMA_VERSION:
            _migrate(connection, version)
        elif version > DATABASE_SCHEMA_VERSION:
            raise UserError(
                f"{state} was written by a newer livedraft (schema {version}, this one reads "
                f"{DATABASE_SCHEMA_VERSION}); give a fresh folder with --state."
            )
        with connection:
            yield connection
    except sqlite3.Error as error:
        raise UserError(
            f"The database in {state} failed ({error}); free disk space or give another --state."
        ) from error
    finally:
        connection.close()


def _migrate(connection: sqlite3.Connection, version: int) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.isolation_level = None  # one transaction of our own: two processes may open a fresh state at once
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        for script in _MIGRATIONS[version:]:
            for statement in script.split(";"):
                if statement.strip():
                    connection.execute(statement)
        connection.execute(f"PRAGMA user_version={DATABASE_SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.isolation_level = "DEFERRED"


def scrub_database(state: Path) -> None:
    """Overwrite deleted rows and empty the write-ahead log: what was deleted must not be readable in any file."""
    with open_database(state) as database:
        database.execute("PRAGMA secure_delete=ON")
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection = sqlite3.connect(state / DATABASE_NAME, timeout=10.0, isolation_level=None)
    try:
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        connection.close()


def write_status(state: Path, name: str, fields: dict[str, Any]) -> None:
    """What a process says of itself (`trainer`, `serving`), for whoever looks: the other process, the command line."""
    with open_database(state) as database:
        database.execute(
            "INSERT INTO status (name, updated_at, fields) VALUES (?, ?, ?)"
            " ON CONFLICT (name) DO UPDATE SET updated_at = excluded.updated_at, fields = excluded.fields",
            (name, time.time(), json.dumps(fields)),
        )


def read_status(state: Path, name: str) -> dict[str, Any]:
    """The last report, with `updated_at`; empty before the first."""
    with open_database(state) as database:
        row = database.execute("SELECT updated_at, fields FROM status WHERE name = ?", (name,)).fetchone()
    return {"updated_at": row[0], **json.loads(row[1])} if row else {}


def read_controls(state: Path) -> dict[str, int]:
    """What an operator has asked for: `paused` (0 or 1), `now` and `forget` (counters)."""
    with open_database(state) as database:
        return {
            "paused": 0,
            "now": 0,
            "forget": 0,
            **dict(database.execute("SELECT name, value FROM controls").fetchall()),
        }


def set_control(state: Path, name: str, value: int | None = None) -> None:
    """Set a control, or count it up."""
    with open_database(state) as database:
        database.execute(
            "INSERT INTO controls (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = coalesce(?, value + 1)",
            (name, 1 if value is None else value, value),
        )


class Registry:
    def __init__(self, state: Path) -> None:
        self.state = state
        self.drafts_folder = state / "drafts"

    def publish(self, save: Callable[[Path], str], version: DraftVersion, status: str = "candidate") -> DraftVersion:
        """Write a version under a temporary name, fsync, rename, then add its row. `save` writes the weights file and
        returns its sha256. A crash leaves either nothing or a whole version."""
        self.drafts_folder.mkdir(parents=True, exist_ok=True)
        temporary = self.drafts_folder / f".tmp-{uuid.uuid4().hex}"
        try:
            temporary.mkdir()
            version = replace(version, sha256=save(temporary / WEIGHTS_NAME))
            (temporary / MANIFEST_NAME).write_text(json.dumps(asdict(version), indent=2), encoding="utf-8")
            for name in (WEIGHTS_NAME, MANIFEST_NAME):
                fsync_path(temporary / name)
            os.rename(temporary, self.folder(version.id))
            fsync_path(self.drafts_folder)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(
                f"A draft version could not be stored in {self.drafts_folder}: {error.strerror}."
            ) from error
        with open_database(self.state) as database:
            database.execute(
                "INSERT INTO versions (id, route, parent, status, created_at, manifest) VALUES (?, ?, ?, ?, ?, ?)",
                (version.id, version.route, version.parent, status, version.created_at, json.dumps(asdict(version))),
            )
        return version

    def promote(self, version_id: str, route: str, decision: dict[str, Any]) -> None:
        """Put a version into service; the one before retires. One transaction, so a reader sees exactly one in service."""
        with open_database(self.state) as database:
            database.execute(
                "UPDATE versions SET status = 'retired' WHERE route = ? AND status = 'in_service'", (route,)
            )
            self._decide(database, version_id, "in_service", decision)

    def roll_back(self, route: str, reason: dict[str, Any]) -> DraftVersion:
        """Put the parent of the version in service back into service. Raises UserError when there is none on disk."""
        current = self.in_service(route)
        if current is None or current.parent is None:
            raise UserError(f"Route {route} has no earlier version to go back to.")
        return self.serve(current.parent, route, reason, status_of_current="rolled_back")

    def serve(
        self, version_id: str, route: str, reason: dict[str, Any], *, status_of_current: str = "retired"
    ) -> DraftVersion:
        """By an operator's word or the watch: this version from now on, whatever the gate said.

        Raises UserError for one that is not on disk or of another route.
        """
        if not self.weights_path(version_id).exists():
            raise UserError(f"There is no version {version_id!r} in {self.drafts_folder}; see `livedraft drafts list`.")
        with open_database(self.state) as database:
            row = database.execute("SELECT manifest, route FROM versions WHERE id = ?", (version_id,)).fetchone()
            if row is None or row[1] != route:
                raise UserError(f"Version {version_id} does not belong to route {route}.")
            database.execute(
                "UPDATE versions SET status = ?, decided_at = ? WHERE route = ? AND status = 'in_service' AND id != ?",
                (status_of_current, time.time(), route, version_id),
            )
            database.execute(
                "UPDATE versions SET status = 'in_service', decided_at = ?,"
                " decision = json_patch(coalesce(decision, '{}'), ?) WHERE id = ?",
                (time.time(), json.dumps(reason), version_id),
            )
        return DraftVersion(**json.loads(row[0]))

    def reject(self, version_id: str, decision: dict[str, Any]) -> None:
        with open_database(self.state) as database:
            self._decide(database, version_id, "rejected", decision)
        shutil.rmtree(self.folder(version_id), ignore_errors=True)  # the row and its numbers stay

    @staticmethod
    def _decide(database: sqlite3.Connection, version_id: str, status: str, decision: dict[str, Any]) -> None:
        changed = database.execute(
            "UPDATE versions SET status = ?, decided_at = ?, decision = ? WHERE id = ?",
            (status, time.time(), json.dumps(decision), version_id),
        ).rowcount
        assert changed == 1, f"unknown version {version_id}"

    def in_service(self, route: str) -> DraftVersion | None:
        with open_database(self.state) as database:
            row = database.execute(
                "SELECT manifest FROM versions WHERE route = ? AND status = 'in_service'", (route,)
            ).fetchone()
        return None if row is None else DraftVersion(**json.loads(row[0]))

    def versions(self, route: str | None = None) -> list[dict[str, Any]]:
        """All rows, oldest first: id, route, status, decision."""
        with open_database(self.state) as database:
            rows = database.execute(
                "SELECT id, route, status, created_at, decided_at, decision FROM versions"
                " WHERE ? IS NULL OR route = ? ORDER BY created_at",
                (route, route),
            ).fetchall()
        names = ("id", "route", "status", "created_at", "decided_at")
        return [
            {**dict(zip(names, row, strict=False)), "decision": json.loads(row[5]) if row[5] else None} for row in rows
        ]

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


def new_version_id(number: int) -> str:
    """Readable in a table, unique across restarts."""
    return f"v{number:04d}-{uuid.uuid4().hex[:6]}"


def lock_state(state: Path) -> TextIO:
    """One process owns a state folder; the lock goes with it."""
    file = None
    try:
        state.mkdir(parents=True, exist_ok=True)
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
