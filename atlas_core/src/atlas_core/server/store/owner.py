"""Whose records a request may see."""

import hashlib

from starlette.datastructures import Headers

from atlas_core.server.auth import given_keys

_CONTEXT = b"atlas store owner\0"


def owner_of(headers: Headers) -> str:
    """A digest of the API key that the request carries; the same for all requests without one.

    Where the server asks for no key, the one that a client sends anyway still keeps its records apart from those of others.
    """
    keys = given_keys(headers)
    return hashlib.sha256(_CONTEXT + keys[0].encode()).hexdigest() if keys else "nobody"
