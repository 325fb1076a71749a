"""Arguments of a call that was cut off, as far as they can be read. Pure."""

import json
from typing import Any

_CLOSE = {"{": "}", "[": "]"}


def read_input(written: str) -> dict[str, Any]:
    """The object in ``written``; of one that is cut off, its whole members; anything else under the name ``arguments``."""
    found = _loads(written)
    if found is None:
        found = _loads(_closed(written))
    if isinstance(found, dict):
        return found
    return {} if not written.strip() else {"arguments": written if found is None else found}


def _closed(written: str) -> str:
    """The beginning of ``written`` that ends with its last whole value, with what it opened closed again."""
    stack: list[str] = []
    whole, open_then = 0, ""
    quoted = skip = is_key = False
    before = ""
    for at, char in enumerate(written):
        if skip:
            skip = False
        elif quoted:
            skip = char == "\\"
            quoted = char != '"'
            if not quoted and not is_key:
                whole, open_then = at + 1, "".join(stack)
        elif char == '"':
            quoted = True
            is_key = bool(stack) and stack[-1] == "{" and before in "{,"
        elif char in "{[":
            stack.append(char)
            whole, open_then = at + 1, "".join(stack)
        elif char in "}]" and stack:
            stack.pop()
            whole, open_then = at + 1, "".join(stack)
        elif char == ",":
            whole, open_then = at, "".join(stack)
        before = before if char.isspace() else char
    return written[:whole] + "".join(_CLOSE[char] for char in reversed(open_then))


def _loads(written: str) -> Any:
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return None
