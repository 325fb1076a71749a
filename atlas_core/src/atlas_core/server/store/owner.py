"""Whose records a request may see."""

import hashlib

from starlette.datastructures import Headers
from starlette.types import Scope

from atlas_core.server.auth import given_keys
from atlas_core.server.keys import make_key

_CONTEXT = b"atlas store owner\0"


def owner_of(scope: Scope) -> str:
    """A digest of the API key that let the request in; the same for all requests without one.

    Where the server asks for no key, the one that a client sends anyway still keeps its records apart from those of others.
    """
    key = scope["state"].get("key")
    if key is None:
        given = given_keys(Headers(scope=scope))
        if not given:
            return "nobody"
        key = make_key(given[0])
    return hashlib.sha256(_CONTEXT + key.digest).hexdigest()
