"""Versions of drafts on disk, and which one serves each route. Folders and manifests are truth; the database can be rebuilt.

    <state>/drafts/<version id>/manifest.json, draft.safetensors
    <state>/livedraft.db          table `versions`: status candidate | in_service | retired | rejected

Called by the trainer (publish, promote, reject) and by the engine's swap thread (in_service); never from the engine
thread.
"""

from __future__ import annotations

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
from typing import Any

from livedraft.records import DraftVersion, UserError

DATABASE_NAME = "livedraft.db"
DATABASE_SCHEMA_VERSION = 1
WEIGHTS_NAME, MANIFEST_NAME = "draft.safetensors", "manifest.json"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS versions (
    id TEXT PRIMARY KEY, route TEXT NOT NULL, parent TEXT, status TEXT NOT NULL, created_at REAL NOT NULL,
    decided_at REAL, manifest TEXT NOT NULL, decision TEXT);
CREATE TABLE IF NOT EXISTS traces (
    id INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL, route TEXT NOT NULL, created_at REAL NOT NULL,
    is_held_out INTEGER NOT NULL, shard TEXT NOT NULL, row INTEGER NOT NULL, num_output_tokens INTEGER NOT NULL,
    draft_version TEXT NOT NULL, alpha REAL, alpha_served REAL);
CREATE TABLE IF NOT EXISTS trainer_status (
    only INTEGER PRIMARY KEY CHECK (only = 1), updated_at REAL NOT NULL, status TEXT NOT NULL);
"""


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
        if version == 0:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.executescript(_SCHEMA)
            connection.execute(f"PRAGMA user_version={DATABASE_SCHEMA_VERSION}")
        elif version != DATABASE_SCHEMA_VERSION:
            raise UserError(
                f"{state} was written by another livedraft (schema {version}, this one reads "
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

    def folder(self, version_id: str) -> Path:
        return self.drafts_folder / version_id

    def weights_path(self, version_id: str) -> Path:
        return self.folder(version_id) / WEIGHTS_NAME


def new_version_id(number: int) -> str:
    """Readable in a table, unique across restarts."""
    return f"v{number:04d}-{uuid.uuid4().hex[:6]}"


def fsync_path(path: Path) -> None:
    """Flush a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
