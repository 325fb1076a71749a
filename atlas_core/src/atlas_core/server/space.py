"""Whose prompts share what was computed of them."""

import hashlib

from starlette.types import Scope

_CONTEXT = b"atlas prefix cache\0"


def space_of(scope: Scope, salt: str | None) -> str:
    """The name space of the prefix cache for a request: that of its API key and its ``salt``, without either the common one.

    How soon an answer begins, and its usage, tell whether somebody has sent the same prompt before. Where clients have keys, that is
    therefore nobody's business but of those who have the same.
    """
    key = scope["state"].get("key")
    if key is None and salt is None:
        return ""
    parts = (b"" if key is None else key.digest, b"" if salt is None else salt.encode())
    return hashlib.sha256(_CONTEXT + b"".join(len(part).to_bytes(4, "little") + part for part in parts)).hexdigest()
