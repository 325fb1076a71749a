"""Records in an SQLite file. Nothing here may run on the event loop; one thread at a time."""

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from atlas_core.server.store.memory import check_size
from atlas_core.server.store.port import Item, Kind, Record, StoreLimits
from atlas_core.vocab.errors import AtlasError, UsageError

VERSION = 1
_APPLICATION = 0x41544C53
"""SQLite's application_id of a store: no other program's file is taken for one."""
_ROW = 64
"""Bytes that a place in a list of items is taken to cost."""
_TABLES = """
CREATE TABLE records (
    number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, kind TEXT NOT NULL, created INTEGER NOT NULL,
    changed REAL NOT NULL, inputs INTEGER NOT NULL, body BLOB NOT NULL, UNIQUE (owner, id)
);
CREATE INDEX records_by_change ON records (changed);
CREATE TABLE members (
    record INTEGER NOT NULL, place INTEGER NOT NULL, item TEXT NOT NULL, digest BLOB NOT NULL, PRIMARY KEY (record, place)
) WITHOUT ROWID;
CREATE INDEX members_by_item ON members (item);
CREATE INDEX members_by_digest ON members (digest);
CREATE TABLE contents (digest BLOB PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
"""
_DIGESTS = "SELECT DISTINCT digest FROM members WHERE record = ? AND (? IS NULL OR item = ?)"


class Database:
    """The tables: ``records``, ``members`` for the items of each in order, and ``contents`` for what items say.

    Histories are sent again and again, so that what several records of one owner have in common is kept once. ``size`` is the bytes
    of everything that is kept.
    """

    def __init__(self, path: Path, limits: StoreLimits, clock: Callable[[], float]) -> None:
        """Open the file, or make it, readable for its owner only. ``clock`` is Unix time, seconds.

        Raises UsageError for a file that cannot be used: unwritable, in use, damaged, or not a store.
        """
        self._limits = limits
        self._clock = clock
        self._file = _opened(path)
        try:
            self.size = self._measured()
            (latest,) = self._file.execute("SELECT coalesce(max(changed), 0.0) FROM records").fetchone()
            self._changed = float(latest)
            with self._change():
                self._evict()
        except sqlite3.Error as error:
            self._file.close()
            raise _unusable(path, str(error)) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def save(self, owner: str, record: Record) -> None:
        """See the port."""
        body = msgspec.json.encode(record.body)
        with self._change():
            self._delete(owner, record.id)
            values = owner, record.id, record.kind, record.created, self._now(), record.inputs, body
            row = self._file.execute(
                "INSERT INTO records (owner, id, kind, created, changed, inputs, body) VALUES (?, ?, ?, ?, ?, ?, ?)",
                values,
            )
            self.size += len(body)
            number = row.lastrowid or 0
            self._add(owner, number, 0, record.items)
            self._evict()

    def load(self, owner: str, kind: Kind, asked: str) -> Record | None:
        """See the port."""
        if self._file.execute("SELECT 1 FROM records WHERE changed < ? LIMIT 1", (self._oldest(),)).fetchone():
            with self._change():
                self._evict()
        found = self._find(owner, kind, asked)
        if found is None:
            return None
        number, created, inputs, body = found
        rows = self._file.execute(
            "SELECT item, body FROM members JOIN contents USING (digest) WHERE record = ? ORDER BY place", (number,)
        )
        items = tuple(_item(name, data) for name, data in rows)
        return Record(asked, kind, created, msgspec.json.decode(body), items, inputs)

    def delete(self, owner: str, kind: Kind, asked: str) -> bool:
        """See the port."""
        if self._find(owner, kind, asked) is None:
            return False
        with self._change():
            self._delete(owner, asked)
        return True

    def append(self, owner: str, asked: str, items: Sequence[Item]) -> bool:
        """See the port."""
        found = self._find(owner, "conversation", asked)
        if found is None:
            return False
        with self._change():
            (place,) = self._file.execute(
                "SELECT coalesce(max(place) + 1, 0) FROM members WHERE record = ?", (found[0],)
            ).fetchone()
            self._add(owner, found[0], place, items)
            self._touch(found[0])
            self._evict()
        return True

    def remove(self, owner: str, asked: str, item_id: str) -> bool:
        """See the port."""
        found = self._find(owner, "conversation", asked)
        if found is None:
            return False
        if self._file.execute(_DIGESTS, (found[0], item_id, item_id)).fetchone() is None:
            return False
        with self._change():
            self._drop(found[0], item_id)
            self._touch(found[0])
        return True

    def rewrite(self, owner: str, asked: str, body: Mapping[str, Any]) -> bool:
        """See the port."""
        found = self._find(owner, "conversation", asked)
        if found is None:
            return False
        data = msgspec.json.encode(body)
        with self._change():
            self._file.execute("UPDATE records SET body = ? WHERE number = ?", (data, found[0]))
            self.size += len(data) - len(found[3])
            self._touch(found[0])
            self._evict()
        return True

    def item(self, owner: str, item_id: str) -> Item | None:
        """See the port."""
        found = self._file.execute(
            "SELECT contents.body FROM members JOIN records ON number = record JOIN contents USING (digest)"
            " WHERE item = ? AND owner = ? AND changed >= ? ORDER BY changed DESC, place LIMIT 1",
            (item_id, owner, self._oldest()),
        ).fetchone()
        return None if found is None else _item(item_id, found[0])

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """A transaction: all of it happens, or nothing."""
        before = self.size
        self._file.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._file.execute("COMMIT")
        except BaseException:
            self.size = before
            if self._file.in_transaction:
                self._file.execute("ROLLBACK")
            raise

    def _find(self, owner: str, kind: Kind, asked: str) -> tuple[int, int, int, bytes] | None:
        found: tuple[int, int, int, bytes] | None = self._file.execute(
            "SELECT number, created, inputs, body FROM records WHERE owner = ? AND id = ? AND kind = ? AND changed >= ?",
            (owner, asked, kind, self._oldest()),
        ).fetchone()
        return found

    def _add(self, owner: str, number: int, place: int, items: Sequence[Item]) -> None:
        for offset, item in enumerate(items):
            data = msgspec.json.encode({name: value for name, value in item.items() if name != "id"})
            # With the owner in it, nobody can find out what others keep by keeping the same.
            digest = hashlib.sha256(owner.encode() + b"\0" + data).digest()
            new = self._file.execute("INSERT OR IGNORE INTO contents VALUES (?, ?)", (digest, data)).rowcount
            self._file.execute("INSERT INTO members VALUES (?, ?, ?, ?)", (number, place + offset, item["id"], digest))
            self.size += _ROW + len(data) * new
        self._check(number)

    def _check(self, number: int) -> None:
        """Raises RequestError for a record that alone is too large."""
        (size,) = self._file.execute(
            "SELECT length(records.body) + coalesce(sum(length(contents.body) + ?), 0) FROM records"
            " LEFT JOIN members ON record = number LEFT JOIN contents USING (digest) WHERE number = ?",
            (_ROW, number),
        ).fetchone()
        check_size(size, self._limits)

    def _touch(self, number: int) -> None:
        self._file.execute("UPDATE records SET changed = ? WHERE number = ?", (self._now(), number))

    def _now(self) -> float:
        """The time, later at each call, so that it tells what changed last."""
        self._changed = max(self._clock(), self._changed + 1e-6)
        return self._changed

    def _evict(self) -> None:
        while True:
            (count,) = self._file.execute("SELECT count(*) FROM records").fetchone()
            found = self._file.execute(
                "SELECT owner, id, changed FROM records ORDER BY changed, number LIMIT 1"
            ).fetchone()
            if found is None or (
                found[2] >= self._oldest() and count <= self._limits.entries and self.size <= self._limits.size
            ):
                return
            self._delete(found[0], found[1])

    def _delete(self, owner: str, asked: str) -> None:
        found = self._file.execute(
            "SELECT number, length(body) FROM records WHERE owner = ? AND id = ?", (owner, asked)
        ).fetchone()
        if found is not None:
            self._drop(found[0])
            self._file.execute("DELETE FROM records WHERE number = ?", (found[0],))
            self.size -= found[1]

    def _drop(self, number: int, item_id: str | None = None) -> None:
        """Delete the members of a record, or the one, and what only they said."""
        values = number, item_id, item_id
        digests = self._file.execute(_DIGESTS, values).fetchall()
        gone = self._file.execute("DELETE FROM members WHERE record = ? AND (? IS NULL OR item = ?)", values)
        self.size -= _ROW * gone.rowcount
        for (digest,) in digests:
            if self._file.execute("SELECT 1 FROM members WHERE digest = ? LIMIT 1", (digest,)).fetchone() is None:
                (size,) = self._file.execute("SELECT length(body) FROM contents WHERE digest = ?", (digest,)).fetchone()
                self._file.execute("DELETE FROM contents WHERE digest = ?", (digest,))
                self.size -= size

    def _measured(self) -> int:
        (members,) = self._file.execute("SELECT count(*) FROM members").fetchone()
        (bodies,) = self._file.execute("SELECT coalesce(sum(length(body)), 0) FROM records").fetchone()
        (contents,) = self._file.execute("SELECT coalesce(sum(length(body)), 0) FROM contents").fetchone()
        return int(bodies + contents + _ROW * members)

    def _oldest(self) -> float:
        return self._clock() - self._limits.retention


def failed(error: sqlite3.Error) -> AtlasError:
    """What to say when the file fails while the server runs."""
    return AtlasError("the store has failed", str(error), "look at its file and at the space on its disk")


def _item(name: str, data: bytes) -> Item:
    return {"id": name, **msgspec.json.decode(data)}


def _opened(path: Path) -> sqlite3.Connection:
    try:
        # Made here, since SQLite would let everybody read it.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error
    connection = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
    try:
        _prepare(connection, path)
    except sqlite3.Error as error:
        connection.close()
        held = isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
        raise _unusable(path, "another server uses it" if held else str(error)) from error
    except UsageError:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    # One server at a time, told at the start and not by the first answer that cannot be kept.
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA auto_vacuum = FULL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute("BEGIN IMMEDIATE")
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables == 0:
        for statement in _TABLES.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
    elif application != _APPLICATION:
        raise _unusable(path, "it is a database of something else")
    elif version != VERSION:
        raise _unusable(path, f"another version of Atlas made it: its form is {version}, this one reads {VERSION}")
    connection.execute("COMMIT")
    found = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
    if found != ["ok"]:
        raise _unusable(path, f"it is damaged: {found[0]}")


def _unusable(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} cannot be used as a store", why, "choose another file with --store, or --store memory")
