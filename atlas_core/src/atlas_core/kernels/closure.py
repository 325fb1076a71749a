"""Everything that one binary depends on: the source and all that it includes in quotes, and the key of the whole."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from atlas_core.kernels.tree import Unit
from atlas_core.vocab.errors import KernelError

Read = Callable[[str], bytes | None]

# A string is matched before a comment can start in it; #include lines are kept whole: their quotes are no strings.
_TOKEN = re.compile(
    rb"""(?P<keep>^[ \t]*\#[ \t]*include\b[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])')"""
    rb"""|(?P<drop>//[^\n]*|/\*.*?\*/)""",
    re.DOTALL | re.MULTILINE,
)
_INCLUDE = re.compile(rb"^[ \t]*#[ \t]*include\b[ \t]*([^\n]*)", re.MULTILINE)


def _strip(text: bytes) -> bytes:
    def replace(match: re.Match[bytes]) -> bytes:
        return match["keep"] if match["keep"] is not None else b" " + b"\n" * match["drop"].count(b"\n")

    return _TOKEN.sub(replace, text)


def _join(folder: str, name: str) -> str | None:
    """``name`` as seen from ``folder``, both ``package:path``; None when it climbs out of the root."""
    package, _, path = folder.partition(":")
    parts = [part for part in path.split("/") if part]
    for part in name.split("/"):
        if part == "..":
            if not parts:
                return None
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return f"{package}:{'/'.join(parts)}"


def _find(name: str, folders: Sequence[str], read: Read) -> tuple[str, bytes] | None:
    for folder in folders:
        path = _join(folder, name)
        content = None if path is None else read(path)
        if path is not None and content is not None:
            return path, content
    return None


def closure(source: str, includes: Sequence[str], read: Read) -> dict[str, str]:
    """SHA-256 (hex) of ``source`` and of every file reached from it by quoted includes, by ``package:path``, sorted.

    ``read`` gives a file's bytes or None. A quoted name is looked for beside its includer, then in ``includes`` in
    order, as compilers do. Conditions are not evaluated: a file included under any condition counts.

    Raises KernelError, naming file and line, for a quoted file that does not exist, a macro as a file name, and an
    angle include of a file of the tree.
    """
    start = read(source)
    if start is None:
        raise KernelError(f"The source {source} does not exist", cure="Correct its name in KERNEL.toml.")
    found = {source: start}
    queue = [source]
    while queue:
        path = queue.pop()
        beside = path.rpartition("/")[0]
        for line, operand in _includes(found[path]):
            place = f"{path}:{line}"
            quoted, angled = re.match(r'"([^"]+)"', operand), re.match(r"<([^>]+)>", operand)
            if quoted:
                hit = _find(quoted[1], (beside, *includes), read)
                if hit is None:
                    raise KernelError(
                        f"{place} includes {quoted[1]!r}, which is not in the tree",
                        f"Searched {', '.join((beside, *includes))}.",
                        "Add the file, or use <> for a header of the toolchain.",
                    )
                if hit[0] not in found:
                    found[hit[0]] = hit[1]
                    queue.append(hit[0])
            elif angled is None:
                raise KernelError(
                    f"{place} includes {operand}, which cannot be followed", cure="Write the file name in quotes."
                )
            elif (hit := _find(angled[1], includes, read)) is not None:
                raise KernelError(
                    f"{place} includes <{angled[1]}>, which is {hit[0]}",
                    "Changes behind <> are not seen by the build.",
                    "Use quotes.",
                )
    return {path: _sha256(found[path]) for path in sorted(found)}


def unchanged(files: Mapping[str, str], listed: Iterable[str], read: Read) -> bool:
    """Whether ``closure`` would give ``files`` again, found out without looking for includes; False where that does not tell.

    Every file has its digest, and no other one of ``listed``, all ids of the packages where includes are looked for, has the name of
    one of them: so nothing else can be found in its place.
    """
    names = Counter(path.rpartition("/")[2] for path in listed)
    for path, digest in files.items():
        content = read(path)
        if content is None or names[path.rpartition("/")[2]] != 1 or _sha256(content) != digest:
            return False
    return True


@lru_cache(maxsize=256)
def _includes(content: bytes) -> tuple[tuple[int, str], ...]:
    """(line, operand) of every #include. Kept, since most headers belong to every module of a library."""
    text = _strip(content)
    return tuple(
        (text[: match.start()].count(10) + 1, match[1].decode("utf-8", "replace").strip())
        for match in _INCLUDE.finditer(text)
    )


@lru_cache(maxsize=256)
def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def source_key(unit: Unit, files: dict[str, str], arch: str) -> str:
    """The key of what the tree says: sources, flags, defines, entries, architecture. Needs no compiler."""
    entries = [[entry.name, [str(param) for param in entry.params]] for entry in unit.entries]
    return _digest(unit.source, files, unit.flags, unit.defines, entries, unit.max_spill_bytes, arch)


def content_key(source: str, prototypes: str, compiler: str) -> str:
    """The key of a binary: its ``source_key``, the text of the prototype header and the compiler's version."""
    return _digest(source, prototypes, compiler)
