"""API keys: those that were given, and those of a file that is read again whenever it changes."""

import hashlib
import hmac
import logging
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from atlas_core.vocab.errors import UsageError

_LOG = logging.getLogger("atlas.server")
_LOOK_EVERY_S = 1.0


class Key(Struct, frozen=True):
    """One key. ``name`` may be shown and logged; ``digest`` is the SHA-256 of the key itself, which is not kept."""

    name: str
    digest: bytes


def make_key(secret: str, name: str = "") -> Key:
    """A key; without a ``name`` it is called by the beginning of its digest."""
    digest = hashlib.sha256(secret.encode("utf-8")).digest()
    return Key(name or f"key-{digest.hex()[:8]}", digest)


def parse_keys(text: str, origin: str) -> tuple[Key, ...]:
    """The keys of a file: one a line, ``KEY`` or ``NAME:KEY``; blank lines and those that begin with ``#`` are comments.

    Raises UsageError that names ``origin`` and the line, never the key: for a key that no header could carry, for a key or a name
    that is there twice, and when there is none at all.
    """
    found: list[Key] = []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        name, colon, secret = (part.strip() for part in entry.partition(":"))
        if not colon:
            name, secret = "", name
        if not secret or not all("!" <= char <= "~" for char in secret) or (colon and not name):
            raise UsageError(
                f"{origin}, line {number} is no API key", "a key is visible ASCII without blanks, after its name and a colon if it has one",
                "write KEY or NAME:KEY",
            )  # fmt: skip
        key = make_key(secret, name)
        for other in found:
            if other.name == key.name or other.digest == key.digest:
                raise UsageError(
                    f"{origin}, line {number} repeats a key or a name", "keys would not tell clients apart",
                    "remove one of the two",
                )  # fmt: skip
        found.append(key)
    if not found:
        raise UsageError(
            f"{origin} has no API key", "nobody could use the server", "add keys, one a line: KEY or NAME:KEY"
        )
    return tuple(found)


class KeyRing:
    """All keys of a server. Used on the event loop's thread only."""

    def __init__(
        self, secrets: Iterable[str] = (), file: Path | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock`` is monotonic, seconds. Raises UsageError when ``file`` cannot be used."""
        self._given = tuple(make_key(secret) for secret in secrets)
        self._file = file
        self._clock = clock
        self._looked = clock()
        self._state = (0, 0, 0)
        self._keys = self._given
        if file is not None:
            self._read(file)

    @property
    def asks(self) -> bool:
        """Whether clients must have a key."""
        return bool(self._keys)

    def find(self, given: Sequence[str]) -> Key | None:
        """The key that is among ``given``, the last one where there are several; None when there is no such key."""
        self._look()
        found = None
        # Every pair is compared, each in constant time: the time taken tells nothing about the keys.
        for digest in [hashlib.sha256(one.encode("utf-8")).digest() for one in given]:
            for key in self._keys:
                if hmac.compare_digest(digest, key.digest):
                    found = key
        return found

    def reload(self) -> None:
        """Read the file again. One that cannot be used is logged, and the keys that were known stay good."""
        if self._file is None:
            return
        try:
            self._read(self._file)
        except UsageError as error:
            _LOG.error("the API keys were not read again, the old ones stay: %s: %s", error.what, error.why)
        else:
            _LOG.info("API keys read again from %s: there are %d", self._file, len(self._keys))

    def _look(self) -> None:
        now = self._clock()
        if self._file is None or now - self._looked < _LOOK_EVERY_S:
            return
        self._looked = now
        try:
            changed = _state(self._file) != self._state
        except OSError:
            return  # editors and secret mounts replace files: it will be back
        if changed:
            self.reload()

    def _read(self, file: Path) -> None:
        try:
            self._state = _state(file)
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise UsageError(
                f"the file of API keys {file} cannot be read",
                reason or "it is not UTF-8",
                "name a file of one key a line",
            ) from None
        self._keys = (*self._given, *parse_keys(text, str(file)))
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            _LOG.warning("the file of API keys %s can be read by others than its owner: chmod 600", file)


def _state(file: Path) -> tuple[int, int, int]:
    """What changes when a file does."""
    found = file.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino
