"""JSON schemas that can be enforced while a text is generated. What cannot is refused, with its keyword and place."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from atlas_core.text.schema.cases import Patterns
from atlas_core.text.schema.document import Document
from atlas_core.text.schema.emit import emitted
from atlas_core.text.schema.keywords import Unenforceable
from atlas_core.text.schema.normal import Normal
from atlas_core.vocab.errors import RequestError

MAX_BYTES = 1 << 18
"""Of a schema as compact JSON."""


def checked(schema: Any, field: str, patterns: Patterns) -> dict[str, Any]:
    """A schema of the same values (members of objects in one order) that the compiler enforces fully.

    ``field`` is the schema's place in the request. Raises RequestError that names keyword and place.
    """
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        _refuse(field, "", "the schema is no object" if schema is not False else "false admits no value")
    try:
        size = len(json.dumps(schema, separators=(",", ":")))
    except (ValueError, TypeError, RecursionError):
        _refuse(field, "", "it is nested too deeply")
    if size > MAX_BYTES:
        _refuse(field, "", f"it has {size} bytes, and {MAX_BYTES} may be")
    try:
        document = Document(schema)
        normal = Normal(document, patterns)
        found = emitted(normal, normal.state(document.root, ()), patterns)
    except Unenforceable as problem:
        _refuse(field, problem.path or "", problem.why, problem.keyword)
    except RecursionError:
        _refuse(field, "", "it is nested too deeply")
    return found if isinstance(found, dict) else {}


def _refuse(field: str, path: str, why: str, keyword: str = "") -> NoReturn:
    place = f" at {path[:256]}" if path else ""
    raise RequestError(
        f"{field}: {keyword[:64] or 'the schema'}{place} cannot be enforced", why, "take it out of the schema, and check it yourself",
        kind="unsupported" if keyword else "invalid", field=field, code="unsupported_schema",
    )  # fmt: skip
