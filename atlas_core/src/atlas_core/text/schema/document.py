"""A schema document: its places, what they are called, and what references mean. Everything in it is looked at once."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from atlas_core.text.schema.keywords import CHECKS, FIRST_CLASS, MANY, NAMED, ONE, Unenforceable, is_annotation
from atlas_core.text.schema.uri import resolved, without_fragment

MAX_DEPTH = 64
MAX_NODES = 20_000

Scope = tuple[str, ...]
"""Resources that were entered on the way here, outermost first; empty where no reference is dynamic."""


class Node(Struct, frozen=True, eq=False):
    """One schema: its value, its place as a pointer, and the URI of the resource that it stands in."""

    schema: Mapping[str, Any] | bool
    path: str
    resource: str

    def at(self, keyword: str) -> str:
        """The place of one of its keywords."""
        return f"{self.path}/{escaped(keyword)}"


class Document:
    """Every schema of a document. Raises Unenforceable for the first keyword or value that cannot be dealt with."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._nodes: dict[str, Node] = {}
        self._resources: dict[str, Node] = {}
        self._anchors: dict[tuple[str, str], Node] = {}
        self._dynamic: dict[tuple[str, str], Node] = {}
        self._says: set[str] = set()
        self.root = self._walk(root, "#", "", 0)
        self._resources.setdefault("", self.root)

    def says(self, *keywords: str) -> bool:
        """Whether any of ``keywords`` occurs."""
        return not self._says.isdisjoint(keywords)

    def child(self, node: Node, *keys: str | int) -> Node:
        """A schema below ``node``, by keyword and name or index."""
        return self._nodes["/".join([node.path, *(escaped(str(key)) for key in keys)])]

    def children(self, node: Node, keyword: str) -> dict[str, Node]:
        """The schemas of a keyword that names them, by name."""
        schema = node.schema
        found: Mapping[str, Any] = schema.get(keyword, {}) if isinstance(schema, Mapping) else {}
        return {name: self.child(node, keyword, name) for name in found}

    def enter(self, node: Node, scope: Scope) -> Scope:
        """The scope inside ``node``."""
        if "$dynamicRef" not in self._says or node.resource in scope:
            return scope
        return (*scope, node.resource)

    def follow(self, node: Node, reference: str) -> Node:
        """What ``$ref`` means at ``node``. Raises Unenforceable."""
        uri, fragment = without_fragment(resolved(node.resource, reference))
        root = self._resources.get(uri)
        found = None
        if root is not None:
            named = fragment and not fragment.startswith("/")
            found = self._anchors.get((uri, fragment)) if named else self._nodes.get(root.path + fragment)
        if found is None:
            raise Unenforceable(f"{reference[:128]!r} is no place in this schema")
        return found

    def follow_dynamic(self, node: Node, reference: str, scope: Scope) -> Node:
        """What ``$dynamicRef`` means at ``node``, reached through ``scope``. Raises Unenforceable."""
        found = self.follow(node, reference)
        name = without_fragment(reference)[1]
        if found is self._dynamic.get((found.resource, name)):
            for resource in scope:
                outer = self._dynamic.get((resource, name))
                if outer is not None:
                    return outer
        return found

    def _walk(self, schema: Any, path: str, resource: str, depth: int) -> Node:
        if not isinstance(schema, Mapping | bool):
            raise Unenforceable("it is neither an object nor a boolean", path)
        if depth > MAX_DEPTH or len(self._nodes) > MAX_NODES:
            raise Unenforceable("it is too large", path)
        own = schema.get("$id") if isinstance(schema, Mapping) else None
        if isinstance(own, str) and own[:1] != "#":
            resource = without_fragment(resolved(resource, own))[0]
        node = self._nodes[path] = Node(schema, path, resource)
        if isinstance(own, str):
            self._resources[resource] = node
        if isinstance(schema, Mapping):
            self._name(node, schema)
            for keys, part in self._parts(node, schema):
                self._walk(part, "/".join([path, *map(escaped, keys)]), resource, depth + 1)
        return node

    def _name(self, node: Node, schema: Mapping[str, Any]) -> None:
        for keyword, table in (("$anchor", self._anchors), ("$dynamicAnchor", self._dynamic)):
            name = schema.get(keyword)
            if isinstance(name, str):
                table[node.resource, name] = node
                self._anchors[node.resource, name] = node

    def _parts(self, node: Node, schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Every schema right below, after a look at the keywords that are none."""
        for keyword, value in schema.items():
            if is_annotation(keyword):
                continue
            self._says.add(keyword)
            path = node.at(keyword)
            if keyword not in FIRST_CLASS:
                raise Unenforceable("generated text cannot be held to it", path, keyword)
            if keyword in ONE:
                yield (keyword,), value
            elif keyword in MANY:
                if not (isinstance(value, Sequence) and not isinstance(value, str) and value):
                    raise Unenforceable("it is no list of schemas", path, keyword)
                yield from (((keyword, str(index)), part) for index, part in enumerate(value))
            elif keyword in NAMED:
                if not isinstance(value, Mapping):
                    raise Unenforceable("it is no object of schemas", path, keyword)
                yield from (((keyword, name), part) for name, part in value.items())
            else:
                problem = CHECKS[keyword](value)
                if problem:
                    raise Unenforceable(problem, path, keyword)


def escaped(name: str) -> str:
    """A name as part of a pointer."""
    return name.replace("~", "~0").replace("/", "~1")
