"""The state folder's database: short-lived connections, schema migrations, and the three small tables through which processes
talk: status (what one says of itself), controls (what an operator asks for), events (what happened, for whoever looks later).

Never called from the engine's thread.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from livedraft.events import Event
from livedraft.records import UserError

DATABASE_NAME = "livedraft.db"
_SCRUB_TRIES = 50
MAX_EVENTS = 5000
"""Kept on disk; the oldest go first."""

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
    """
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, name TEXT NOT NULL, fields TEXT NOT NULL);
ALTER TABLE traces ADD COLUMN is_repeat INTEGER;
""",
    """
CREATE TABLE deletions (whose TEXT NOT NULL, at REAL NOT NULL);
""",
)
DATABASE_SCHEMA_VERSION = len(_MIGRATIONS)


@contextmanager
def open_database(state: Path) -> Iterator[sqlite3.Connection]:
    """A short-lived connection: WAL, busy timeout, one transaction. Raises UserError for another schema or a full disk."""
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)  # traces hold what people wrote
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


def set_damaged_database_aside(state: Path) -> Path | None:
    """For the owner of the folder, at start: a file that is no database any more is kept under another name, and a fresh one is
    filled from folders and shards (`reconcile`). Returns the new name, or None when there was nothing wrong."""
    path = state / DATABASE_NAME
    if not path.exists():
        return None
    try:
        connection = sqlite3.connect(path, timeout=10.0)
        try:
            is_sound = connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok"
        finally:
            connection.close()
    except sqlite3.OperationalError:  # locked, or the disk fails: not for us to move it
        return None
    except sqlite3.DatabaseError:
        is_sound = False
    if is_sound:
        return None
    aside = path.with_name(f"{DATABASE_NAME}.damaged-{time.time_ns()}")
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        path.with_name(DATABASE_NAME + suffix).unlink(missing_ok=True)
    return aside


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
        for _ in range(_SCRUB_TRIES):
            is_busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            if not is_busy:
                break
            time.sleep(0.1)
    except sqlite3.Error as error:
        raise UserError(
            f"Deleted rows could not be overwritten ({error}); free disk space and delete again."
        ) from error
    finally:
        connection.close()
    if is_busy:
        raise UserError("Deleted rows could not be overwritten while the database was in use; delete again.")


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
    """What an operator has asked for: `paused` (0 or 1), `now` and `forget` (counters); and what trainers have done of it."""
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


def record_events(state: Path, events: Iterable[Event]) -> None:
    """Keep what happened. Raises UserError when the database cannot be written."""
    rows = [
        (
            event["time"],
            event["event"],
            json.dumps({k: v for k, v in event.items() if k not in ("time", "event")}, default=str),
        )
        for event in events
    ]
    if not rows:
        return
    with open_database(state) as database:
        database.executemany("INSERT INTO events (time, name, fields) VALUES (?, ?, ?)", rows)
        database.execute("DELETE FROM events WHERE id <= (SELECT max(id) FROM events) - ?", (MAX_EVENTS,))


def read_events(state: Path, *, after_id: int = 0, limit: int = 100) -> list[Event]:
    """The newest `limit` events or, with `after_id`, the next ones after that; oldest first, each with its `id`."""
    order = "ASC" if after_id else "DESC"
    with open_database(state) as database:
        rows = database.execute(
            f"SELECT id, time, name, fields FROM events WHERE id > ? ORDER BY id {order} LIMIT ?", (after_id, limit)
        ).fetchall()
    return [{"id": row[0], "time": row[1], "event": row[2], **json.loads(row[3])} for row in sorted(rows)]
