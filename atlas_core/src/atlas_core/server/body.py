"""A request's body: bounded bytes, then an object. Everything that could hurt later is refused here."""

import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, NoReturn

from atlas_core.vocab.errors import RequestError

MAX_DEPTH = 64
"""Objects and arrays inside one another. JSON schemas of tools, the deepest thing that is sent, stay far below."""

_NESTED = {dict, list}
"""What json.loads makes of objects and arrays."""
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(headers: Mapping[str, str], chunks: AsyncIterator[bytes], limit: int) -> bytes:
    """All of the body. Raises RequestError before more than ``limit`` bytes are held, and for any content encoding."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise RequestError(
            f"the body is encoded as {encoding[:32]}", "a small body could grow without bound", "send it as it is",
            kind="unsupported", code="unsupported_encoding",
        )  # fmt: skip
    declared = headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > limit:
        raise _too_large(limit)
    parts = []
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        parts.append(chunk)
    return b"".join(parts)


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``.

    Raises RequestError for what is not UTF-8 or not JSON, for half of a surrogate pair, NaN, a name given twice, anything nested
    more than MAX_DEPTH deep, and for a top level that is no object.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid("the body is not UTF-8", f"byte {error.start} cannot be read", "invalid_utf8") from None
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as error:
        why = f"{error.msg}, line {error.lineno} column {error.colno}"
        raise _invalid("the body is not JSON", why, "invalid_json") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        # Python refuses to read integers of thousands of digits.
        raise _invalid("the body is not usable", "a number is too long", "invalid_json") from None
    if not isinstance(value, dict):
        raise _invalid("the body is not a JSON object", f"it is {_name(value)}", "invalid_json")
    _check(value, surrogates=_ESCAPED_SURROGATE.search(data) is not None)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        # No telling which of the two values was meant; proxies and servers have disagreed about that.
        raise RequestError(
            f"the name {twice[:64]!r} is given twice in one object", "only one of its values could count", "give it once",
            code="invalid_json",
        )  # fmt: skip
    return found


def _constant(name: str) -> NoReturn:
    raise _invalid("the body is not JSON", f"{name} is not a JSON number", "invalid_json")


def _check(value: Any, *, surrogates: bool) -> None:
    """Walk the value with a stack of its own; strings are looked at only when an escape made halves of pairs possible."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for node in level:
            children = node.values() if isinstance(node, dict) else node
            if surrogates:
                for text in (*node, *children) if isinstance(node, dict) else node:
                    if isinstance(text, str):
                        _check_text(text)
            # Prompts are lists of many thousand ids, and all running streams wait for this thread.
            if not _NESTED.isdisjoint(map(type, children)):
                below += [child for child in children if type(child) in _NESTED]
        if not below:
            return
        level = below
    raise _too_deep()


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _invalid(
            "the body is not valid Unicode", "a \\u escape is half of a surrogate pair", "invalid_unicode"
        ) from None


def _name(value: Any) -> str:
    if value is None:
        return "null"
    return {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}[type(value)]


def _invalid(what: str, why: str, code: str) -> RequestError:
    return RequestError(what, why, "send one JSON object, encoded as UTF-8", code=code)


def _too_deep() -> RequestError:
    return _invalid("the body is nested too deeply", f"at most {MAX_DEPTH} levels are read", "invalid_json")


def _too_large(limit: int) -> RequestError:
    return RequestError(
        "the body is too large", f"at most {limit} bytes are read", "send less, or start the server with a larger --max-body",
        kind="too_large",
    )  # fmt: skip
