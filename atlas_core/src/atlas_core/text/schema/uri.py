"""References between URIs, as RFC 3986 resolves them; ``urllib`` would also open them, which nothing here may."""

import re

_PARTS = re.compile(r"^(?:([^:/?#]+):)?(?://([^/?#]*))?([^?#]*)(\?[^#]*)?(#.*)?$", re.DOTALL)
"""Appendix B: scheme, authority, path, query, fragment."""
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")


def without_fragment(uri: str) -> tuple[str, str]:
    """A URI and its fragment, percent-decoded."""
    plain, _, fragment = uri.partition("#")
    raw = _ESCAPE.sub(lambda found: bytes([int(found[1], 16)]), fragment.encode("utf-8", "surrogatepass"))
    return plain, raw.decode("utf-8", "replace")


def resolved(base: str, reference: str) -> str:
    """``reference`` seen from ``base`` (section 5.2.2); without a base that says more, the reference itself."""
    scheme, authority, path, query, fragment = _split(reference)
    own_scheme, own_authority, own_path, own_query, _ = _split(base)
    if scheme:
        return _joined(scheme, authority, _tidy(path), query, fragment)
    if authority is not None:
        return _joined(own_scheme, authority, _tidy(path), query, fragment)
    if not path:
        return _joined(own_scheme, own_authority, own_path, query or own_query, fragment)
    if not path.startswith("/"):
        folder = "/" if own_authority is not None and not own_path else own_path[: own_path.rfind("/") + 1]
        path = folder + path
    return _joined(own_scheme, own_authority, _tidy(path), query, fragment)


def _split(uri: str) -> tuple[str, str | None, str, str, str]:
    found = _PARTS.match(uri)
    if found is None:
        return "", None, uri, "", ""
    return found[1] or "", found[2], found[3], found[4] or "", found[5] or ""


def _joined(scheme: str, authority: str | None, path: str, query: str, fragment: str) -> str:
    head = f"{scheme}:" if scheme else ""
    return f"{head}{'' if authority is None else f'//{authority}'}{path}{query}{fragment}"


def _tidy(path: str) -> str:
    """``path`` without dots (section 5.2.4)."""
    if "." not in path:
        return path
    found: list[str] = []
    parts = path.split("/")
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part == "..":
            if len(found) > 1:
                found.pop()
            found += [""] if last else []
        elif part == ".":
            found += [""] if last else []
        else:
            found.append(part)
    return "/".join(found)
