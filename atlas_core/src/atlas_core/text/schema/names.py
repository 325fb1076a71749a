"""Regular expressions of sets of texts, for the names of members."""

from collections.abc import Collection, Iterable
from math import inf

from atlas_core.text.schema.cases import Text
from atlas_core.text.schema.keywords import Unenforceable

_SPECIAL = frozenset("\\.+*?()|[]{}^$#&-~/ \t\n\r\f\v")


def name_pattern(text: Text) -> str:
    """One regular expression for ``text``. Raises Unenforceable where that takes several that hold together."""
    found = sorted(text.patterns)
    if text.values is not None:
        found.append(f"^(?:{'|'.join(map(quoted, sorted(text.values)))})$")
    if text.least or text.most < inf:
        found.append(f"^(?s:.{{{text.least},{'' if text.most == inf else int(text.most)}}})$")
    if text.banned:
        found.append(other_than(text.banned))
    if len(found) != 1 or text.formats:
        raise Unenforceable("names of members have one pattern, or one limit")
    return found[0]


def quoted(text: str) -> str:
    """The regular expression of a text itself."""
    return "".join(f"\\x{{{ord(char):x}}}" if char in _SPECIAL else char for char in text)


def other_than(texts: Collection[str]) -> str:
    """A regular expression of every text but ``texts``."""
    return f"^(?s:{_other(sorted(texts))})$"


def _other(texts: Iterable[str]) -> str:
    """Text that is none of ``texts``: it leaves their tree at some character, or ends at a place where none of them does."""
    tree: dict[str, list[str]] = {}
    ended = False
    for text in texts:
        if text:
            tree.setdefault(text[0], []).append(text[1:])
        else:
            ended = True
    ways = [f"{quoted(char)}(?:{_other(rest)})" for char, rest in tree.items()]
    ways.append(f"[^{''.join(map(quoted, tree))}].*" if tree else ".+")
    return "|".join(ways if ended else ["", *ways])


def writable(text: str) -> str:
    """``text`` as it is. Raises Unenforceable for control characters that answers never have: they need escapes by number."""
    if any(
        (char < " " and char not in "\b\t\n\f\r") or char == "\x7f" or "\ud800" <= char <= "\udfff" for char in text
    ):
        raise Unenforceable("control characters and halves of characters are not written")
    return text
