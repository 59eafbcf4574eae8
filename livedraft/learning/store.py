"""The trace store: safetensors shards plus one row a trace in SQLite. Survives kill -9: a shard is whole or absent, and
its rows come after it.

    <state>/traces/shard-<id>.safetensors     named tensors, concatenated over the shard's traces, with offsets
    <state>/livedraft.db                      table `traces`

Readers ignore tensor names they do not know, so a later schema can add some.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from livedraft.drafts.database import open_database, scrub_database
from livedraft.drafts.registry import fsync_path
from livedraft.records import TRACE_SCHEMA_VERSION, SamplingParams, Trace, UserError, is_held_out

_MAX_OPEN_SHARDS = 8
_BEING_WRITTEN_SECONDS = 2.0
"""A younger shard without rows may get them any moment, from a server at work."""
_EVERYBODY = "everybody"
_LONGEST_REQUEST_SECONDS = 86400.0
"""For so long a deletion is remembered, for requests that were running then."""
_UNREADABLE = (OSError, SafetensorError, KeyError, ValueError, TypeError)
"""What reading a damaged shard raises."""

# Array fields by the letter they run over: T output positions, P drafted positions.
_PER_OUTPUT = ("teacher_token_ids_TK", "teacher_log_probs_TK", "tail_mass_T", "round_number_T")
_PER_DRAFTED = (
    "drafted_position_P",
    "drafted_token_id_P",
    "drafted_log_prob_P",
    "drafted_target_log_prob_P",
    "drafted_accepted_P",
    "drafted_off_path_P",
    "draft_top_token_ids_PQ",
    "draft_top_log_probs_PQ",
)


@dataclass(frozen=True, kw_only=True)
class TraceRow:
    id: int
    request_id: str
    route: str
    is_held_out: bool
    shard: str
    row: int
    num_output_tokens: int
    draft_version: str
    alpha: float | None
    alpha_served: float | None


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Some of the routes that requests were given: those named, or all but those named."""

    names: tuple[str, ...] = ()
    are_left_out: bool = True

    def include(self, route: str) -> bool:
        return (route in self.names) != self.are_left_out

    def as_sql(self) -> tuple[str, tuple[str, ...]]:
        """A condition on `route`, and its values."""
        places = ", ".join("?" * len(self.names))
        return f"route {'NOT ' if self.are_left_out else ''}IN ({places})", self.names


class TraceStore:
    def __init__(self, state: Path) -> None:
        self.state = state
        self.folder = state / "traces"
        self.num_set_aside = 0
        """Shards that could not be read."""
        self._open_shards: OrderedDict[str, list[Trace]] = OrderedDict()

    def append(self, traces: Sequence[Trace]) -> None:
        """Write one shard, then its rows; what arrived before its client's traces were deleted is left out. Raises OSError or
        UserError when the disk is full; then nothing is stored."""
        name = _new_name()
        self._write(traces, name)
        try:
            self._enter(traces, name)
        except BaseException:
            self._forget_file(name)  # nobody would find it, not even a deletion
            raise

    def _enter(self, traces: Sequence[Trace], name: str, *, is_found_again: bool = False) -> int:
        """Rows for a shard that is written, or for a smaller one where some of it must not be kept; returns how many."""
        kept = self._add_rows(traces, name, is_found_again=is_found_again)
        if len(kept) < len(traces):
            if kept:
                self._write(kept, smaller := _new_name())
                self._enter(kept, smaller, is_found_again=is_found_again)
            self._forget_file(name)
        return len(kept)

    def _write(self, traces: Sequence[Trace], name: str) -> None:
        """A whole shard or none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".tmp-{name}"
        try:
            write_shard(temporary, traces)
            fsync_path(temporary)
            os.rename(temporary, self.folder / name)
            fsync_path(self.folder)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise OSError(f"trace shard not written: {error}") from error

    def _add_rows(self, traces: Sequence[Trace], name: str, *, is_found_again: bool = False) -> Sequence[Trace]:
        """All of them, or none when some must not be kept any more; returns those that may be."""
        with open_database(self.state) as database:
            database.execute("BEGIN IMMEDIATE")  # a deletion either finds these rows, or is seen here
            # A deletion in the future was made while the clock was wrong.
            deleted = dict(
                database.execute(
                    "SELECT whose, max(at) FROM deletions WHERE at <= ? GROUP BY whose", (time.time(),)
                ).fetchall()
            )
            kept = [trace for trace in traces if not _is_deleted(trace, deleted)]
            if len(kept) < len(traces):
                return kept
            database.executemany(
                "INSERT INTO traces (request_id, route, created_at, is_held_out, shard, row, num_output_tokens,"
                " draft_version, client_key) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        trace.request_id,
                        trace.route,
                        trace.arrived_at if is_found_again else time.time(),
                        is_held_out(trace.conversation_key),
                        name,
                        row,
                        len(trace.output_token_ids),
                        trace.draft_version,
                        trace.client_key,
                    )
                    for row, trace in enumerate(traces)
                ],
            )
        return traces

    def rows(self, *, after_id: int = 0, streams: Streams | None = None, limit: int = 10_000) -> list[TraceRow]:
        """Rows newer than `after_id`, oldest first; of some streams only."""
        condition, values = (streams or Streams()).as_sql()
        with open_database(self.state) as database:
            found = database.execute(
                "SELECT id, request_id, route, is_held_out, shard, row, num_output_tokens, draft_version, alpha,"
                f" alpha_served FROM traces WHERE id > ? AND {condition} ORDER BY id LIMIT ?",
                (after_id, *values, limit),
            ).fetchall()
        names = list(TraceRow.__dataclass_fields__)
        return [TraceRow(**{**dict(zip(names, row, strict=True)), "is_held_out": bool(row[3])}) for row in found]

    def read(self, row: TraceRow) -> Trace | None:
        """The trace itself, or None when its shard is missing or damaged (then it is set aside and its rows dropped)."""
        traces = self._open_shards.get(row.shard)
        if traces is None:
            try:
                traces = read_shard(self.folder / row.shard)
            except _UNREADABLE:
                self._set_aside(row.shard)
                return None
            self._open_shards[row.shard] = traces
            if len(self._open_shards) > _MAX_OPEN_SHARDS:
                self._open_shards.popitem(last=False)
        return traces[row.row]

    def summary(self) -> dict[str, Any]:
        """How many traces, since when, and alpha of the last hundred scored ones: all of them, those whose prompt had been
        trained on, and those whose prompt had not."""
        with open_database(self.state) as database:
            total, oldest = database.execute("SELECT count(*), min(created_at) FROM traces").fetchone()
            scored = database.execute(
                "SELECT alpha, is_repeat FROM traces WHERE alpha IS NOT NULL ORDER BY id DESC LIMIT 100"
            ).fetchall()

        def mean(values: list[float]) -> float | None:
            return sum(values) / len(values) if values else None

        return {
            "traces": total,
            "oldest_trace_at": oldest,
            "store_bytes": sum(path.stat().st_size for path in self.folder.glob("shard-*")),
            "alpha_last_100": mean([alpha for alpha, _ in scored]),
            "alpha_seen_prompts": mean([alpha for alpha, is_repeat in scored if is_repeat]),
            "alpha_new_prompts": mean([alpha for alpha, is_repeat in scored if not is_repeat]),
        }

    def by_route(self) -> dict[str, tuple[int, float | None]]:
        """Of each stream of traffic: how many traces, and mean alpha of the last hundred scored ones. The largest first."""
        with open_database(self.state) as database:
            counts = database.execute("SELECT route, count(*) FROM traces GROUP BY route ORDER BY 2 DESC").fetchall()
            return {
                route: (
                    count,
                    database.execute(
                        "SELECT avg(alpha) FROM (SELECT alpha FROM traces WHERE route = ? AND alpha IS NOT NULL"
                        " ORDER BY id DESC LIMIT 100)",
                        (route,),
                    ).fetchone()[0],
                )
                for route, count in counts
            }

    def close_shards(self) -> None:
        """Read from disk again next time: shards may have been rewritten."""
        self._open_shards.clear()

    def record_alpha(self, scores: dict[int, tuple[float, float, bool]]) -> None:
        """Store (alpha, alpha_served, whether its prompt had been trained on before) by trace id."""
        with open_database(self.state) as database:
            database.executemany(
                "UPDATE traces SET alpha = ?, alpha_served = ?, is_repeat = ? WHERE id = ?",
                [(alpha, served, int(is_repeat), trace_id) for trace_id, (alpha, served, is_repeat) in scores.items()],
            )

    # --- after a crash ----------------------------------------------------------------------------------------------

    def reconcile(self) -> int:
        """For the owner of the folder, at start: half-written shards go, and whole ones whose rows were not written in time get
        them. A shard with a trace that is known already is what a cut-short deletion left over, and goes. Returns how many
        traces were found again."""
        if not self.folder.exists():
            return 0
        for leftover in self.folder.glob(".tmp-*"):
            leftover.unlink(missing_ok=True)
        with self._alone():
            return self._adopt_lost_shards(youngest_seconds=0.0)

    def _adopt_lost_shards(self, *, youngest_seconds: float) -> int:
        with open_database(self.state) as database:
            shards = {row[0] for row in database.execute("SELECT DISTINCT shard FROM traces").fetchall()}
            known_ids = {row[0] for row in database.execute("SELECT request_id FROM traces").fetchall()}
        num_found = 0
        for path in sorted(self.folder.glob("shard-*.safetensors")):
            if path.name in shards or time.time() - path.stat().st_mtime < youngest_seconds:
                continue
            try:
                traces = read_shard(path)
            except _UNREADABLE:
                self._set_aside(path.name)
                continue
            if any(trace.request_id in known_ids for trace in traces):
                path.unlink()
                continue
            num_found += self._enter(traces, path.name, is_found_again=True)
        return num_found

    # --- limits and deletion ----------------------------------------------------------------------------------------

    def enforce_limits(self, *, max_bytes: float, max_age_seconds: float) -> int:
        """Remove the oldest shards past the limits, with their rows; returns how many traces went. Damaged files age too."""
        with self._alone():
            return self._enforce_limits(max_bytes, max_age_seconds)

    def _enforce_limits(self, max_bytes: float, max_age_seconds: float) -> int:
        for damaged in self.folder.glob("*.damaged"):
            if time.time() - damaged.stat().st_mtime > max_age_seconds:
                damaged.unlink(missing_ok=True)
        shards = []
        with open_database(self.state) as database:
            for shard, newest in database.execute(
                "SELECT shard, max(created_at) FROM traces GROUP BY shard"
            ).fetchall():
                path = self.folder / shard
                shards.append((newest, shard, path.stat().st_size if path.exists() else 0))
        shards.sort(reverse=True)
        kept_bytes, doomed = 0, []
        for newest, shard, size in shards:
            kept_bytes += size
            if kept_bytes > max_bytes or time.time() - newest > max_age_seconds:
                doomed.append(shard)
        return sum(self._remove_shard(shard) for shard in doomed)

    def delete_all(self) -> int:
        """Every trace, of everybody, with whatever is damaged."""
        with self._alone():
            self._note_deletion(_EVERYBODY)
            with open_database(self.state) as database:
                count: int = database.execute("SELECT count(*) FROM traces").fetchone()[0]
            for path in self.folder.glob("*") if self.folder.exists() else ():
                self._open_shards.pop(path.name, None)
                path.unlink(missing_ok=True)  # a shard being written just now gets its name meanwhile
            with open_database(self.state) as database:
                database.execute("DELETE FROM traces")
            self._remove_damaged()
        scrub_database(self.state)
        return count

    def delete_client(self, client_key: str) -> int:
        """Remove all traces of a client, rewriting the shards they share with others, so that nothing of them is left on
        disk: not in a shard, a damaged file, the database or its log. Returns how many.

        Raises UserError, and can be done again, when the disk is full or the database in use.
        """
        with self._alone():
            self._adopt_lost_shards(youngest_seconds=_BEING_WRITTEN_SECONDS)
            self._note_deletion(_whose(client_key))
            with open_database(self.state) as database:
                found = database.execute("SELECT shard, row FROM traces WHERE client_key = ?", (client_key,)).fetchall()
            doomed: dict[str, set[int]] = {}
            for shard, row in found:
                doomed.setdefault(shard, set()).add(row)
            try:
                for shard, rows in doomed.items():
                    self._rewrite_shard(shard, rows)
            except OSError as error:
                raise UserError(
                    f"Not all traces could be deleted ({error}); free disk space and delete again."
                ) from error
            self._remove_damaged()
        scrub_database(self.state)
        return len(found)

    def _note_deletion(self, whose: str) -> None:
        """Before anything is looked for: requests that run now are written later, and must not be."""
        with open_database(self.state) as database:
            database.execute("DELETE FROM deletions WHERE at < ?", (time.time() - _LONGEST_REQUEST_SECONDS,))
            database.execute("INSERT INTO deletions (whose, at) VALUES (?, ?)", (whose, time.time()))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Deletions and limits move rows between shards: one process at a time."""
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.state / "traces.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _remove_damaged(self) -> None:
        """Nobody can say whose they were."""
        for damaged in (*self.folder.glob("*.damaged"), *self.state.glob("livedraft.db.damaged-*")):
            damaged.unlink(missing_ok=True)

    def _rewrite_shard(self, shard: str, doomed: set[int]) -> None:
        try:
            traces = read_shard(self.folder / shard)
        except _UNREADABLE:  # nobody can say whose the rest of it is
            self._remove_shard(shard)
            return
        kept = [(row, trace) for row, trace in enumerate(traces) if row not in doomed]
        if not kept:
            self._remove_shard(shard)
            return
        name = _new_name()
        self._write([trace for _, trace in kept], name)
        with open_database(self.state) as database:
            for row in doomed:
                database.execute("DELETE FROM traces WHERE shard = ? AND row = ?", (shard, row))
            for new_row, (old_row, _) in enumerate(kept):
                database.execute(
                    "UPDATE traces SET shard = ?, row = ? WHERE shard = ? AND row = ?", (name, new_row, shard, old_row)
                )
        self._forget_file(shard)

    def _remove_shard(self, shard: str) -> int:
        self._forget_file(shard)  # first: a shard without rows would be found again after a crash, rows without one go
        with open_database(self.state) as database:
            count: int = database.execute("DELETE FROM traces WHERE shard = ?", (shard,)).rowcount
        return count

    def _forget_file(self, shard: str) -> None:
        self._open_shards.pop(shard, None)
        (self.folder / shard).unlink(missing_ok=True)

    def _set_aside(self, shard: str) -> None:
        path = self.folder / shard
        if path.exists():
            self.num_set_aside += 1
            os.replace(path, path.with_suffix(".damaged"))
        with open_database(self.state) as database:
            database.execute("DELETE FROM traces WHERE shard = ?", (shard,))


def _new_name() -> str:
    return f"shard-{uuid.uuid4().hex}.safetensors"


def _whose(client_key: str) -> str:
    """A client as deletions name it: their own key must be in no file any more."""
    return hashlib.blake2b(client_key.encode(), digest_size=16).hexdigest()


def _is_deleted(trace: Trace, deleted: Mapping[str, float]) -> bool:
    """Did it arrive before a deletion that means it?"""
    latest = max(deleted.get(_EVERYBODY, 0.0), deleted.get(_whose(trace.client_key), 0.0) if deleted else 0.0)
    return trace.arrived_at <= latest


# --- traces in memory -----------------------------------------------------------------------------------------------

_MEMORY_FOLDER = Path("/dev/shm")


def keep_in_memory(state: Path) -> None:
    """From now on the state's traces live on tmpfs: `traces` is a link to a folder there. Raises UserError where there is
    none, or when traces are kept on disk already."""
    clear_memory(state)
    folder = state / "traces"
    if folder.exists() and any(folder.iterdir()):
        raise UserError(
            f"{folder} holds traces on disk; delete them (livedraft traces delete --all) or give another --state for "
            "memory_only."
        )
    if not _MEMORY_FOLDER.is_dir():
        raise UserError("memory_only needs a memory file system at /dev/shm, and this system has none.")
    name = hashlib.blake2b(str(state.resolve()).encode(), digest_size=8).hexdigest()
    in_memory = _MEMORY_FOLDER / f"livedraft-{os.getuid()}-{name}"
    shutil.rmtree(in_memory, ignore_errors=True)  # of a process that was killed
    in_memory.mkdir(mode=0o700)
    if folder.exists():
        folder.rmdir()
    folder.symlink_to(in_memory)


def clear_memory(state: Path) -> None:
    """Traces that `keep_in_memory` kept are gone, with their rows; those on disk stay."""
    folder = state / "traces"
    if not folder.is_symlink():
        return
    shutil.rmtree(folder.resolve(), ignore_errors=True)
    folder.unlink()
    with open_database(state) as database:
        database.execute("DELETE FROM traces")
    scrub_database(state)


def write_shard(path: Path, traces: Sequence[Trace]) -> None:
    """All traces into one file. Raises OSError or SafetensorError."""

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(trace, name) for trace in traces])

    def offsets(lengths: list[int]) -> np.ndarray:
        return np.cumsum([0, *lengths]).astype(np.int64)

    tensors = {name: joined(name) for name in (*_PER_OUTPUT, *_PER_DRAFTED)}
    tensors["prompt_token_ids"] = np.concatenate([np.array(t.prompt_token_ids, dtype=np.int32) for t in traces])
    tensors["output_token_ids"] = np.concatenate([np.array(t.output_token_ids, dtype=np.int32) for t in traces])
    tensors["prompt_offsets"] = offsets([len(t.prompt_token_ids) for t in traces])
    tensors["output_offsets"] = offsets([len(t.output_token_ids) for t in traces])
    tensors["drafted_offsets"] = offsets([len(t.drafted_position_P) for t in traces])
    scalars = [
        {
            "request_id": t.request_id,
            "route": t.route,
            "target_fingerprint": t.target_fingerprint,
            "sampling": asdict(t.sampling),
            "draft_version": t.draft_version,
            "arrived_at": t.arrived_at,
            "conversation_key": t.conversation_key,
            "client_key": t.client_key,
            "position_version_T": t.position_version_T,
        }
        for t in traces
    ]
    metadata = {"schema_version": str(TRACE_SCHEMA_VERSION), "traces": json.dumps(scalars)}
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path, metadata=metadata)


def read_recorded(path: Path) -> list[Trace]:
    """A file of traces that a user names. Raises UserError when it is none."""
    try:
        return read_shard(path)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{path} cannot be read as recorded traces ({error}).") from error


def read_shard(path: Path) -> list[Trace]:
    """Raises OSError, SafetensorError, KeyError or ValueError for a file that is none, or of another schema."""
    with safe_open(path, framework="numpy") as shard:
        metadata = shard.metadata()
        if metadata.get("schema_version") != str(TRACE_SCHEMA_VERSION):
            raise ValueError(f"{path} has schema {metadata.get('schema_version')}")
        names = (*_PER_OUTPUT, *_PER_DRAFTED, "prompt_token_ids", "output_token_ids")
        tensors = {name: shard.get_tensor(name) for name in names}
        bounds = {kind: shard.get_tensor(f"{kind}_offsets") for kind in ("prompt", "output", "drafted")}
    traces = []
    for row, scalars in enumerate(json.loads(metadata["traces"])):
        prompt, output, drafted = (slice(*bounds[kind][row : row + 2]) for kind in ("prompt", "output", "drafted"))
        fields: dict[str, Any] = {name: tensors[name][output] for name in _PER_OUTPUT}
        fields |= {name: tensors[name][drafted] for name in _PER_DRAFTED}
        sampling = scalars.pop("sampling")
        for name in ("stop_token_ids", "stop"):
            sampling[name] = tuple(sampling.get(name, ()))
        sampling["logit_bias"] = tuple((token, addend) for token, addend in sampling.get("logit_bias", ()))
        traces.append(
            Trace(
                **scalars,
                **fields,
                sampling=SamplingParams(**sampling),
                prompt_token_ids=tensors["prompt_token_ids"][prompt].tolist(),
                output_token_ids=tensors["output_token_ids"][output].tolist(),
            )
        )
    return traces
