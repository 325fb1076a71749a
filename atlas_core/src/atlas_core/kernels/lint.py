"""What is wrong in a kernel tree as its authors see it: a list of findings, empty when all is well."""

import hashlib
from collections.abc import Iterator

from atlas_core.kernels.closure import closure
from atlas_core.kernels.tree import COMMON, HEADER_SUFFIXES, SOURCE_SUFFIXES, Finding, KernelTree, suffix
from atlas_core.vocab.errors import KernelError


def lint(tree: KernelTree) -> tuple[Finding, ...]:
    """Everything that assembling found, and what only authors care about: copies, unused headers, links outside."""
    findings = [*tree.findings, *_links(tree), *_copies(tree)]
    reached: set[str] = set()
    complete = not tree.findings
    for hardware in sorted(tree.hardware):
        layers = [COMMON, *(f"{model}/{quant}" for machine, model, quant in sorted(tree.leaves) if machine == hardware)]
        for layer in layers:
            try:
                units, broken = tree.stack(hardware, layer)
            except KernelError as error:
                findings.append(Finding(hardware, error.what, error.cure))
                complete = False
                continue
            findings += broken
            for unit in units:
                try:
                    reached |= closure(unit.source, unit.includes, tree.read).keys()
                except KernelError as error:
                    findings.append(Finding(f"{hardware}/{layer} {unit.module}", error.what, error.cure))
                    complete = False
    if complete:
        # Only then does "reached by nobody" mean anything.
        findings += _unused(tree, reached)
    return tuple(dict.fromkeys(findings))


def _code(tree: KernelTree) -> Iterator[tuple[str, str, bytes]]:
    for package, root in sorted(tree.roots.items()):
        for path, content in sorted(root.files.items()):
            if suffix(path) in SOURCE_SUFFIXES | HEADER_SUFFIXES:
                yield package, path, content


def _copies(tree: KernelTree) -> Iterator[Finding]:
    first: dict[str, str] = {}
    for package, path, content in _code(tree):
        if path in tree.roots[package].links:
            continue
        here = f"{package}:{path}"
        other = first.setdefault(hashlib.sha256(content).hexdigest(), here)
        if other != here:
            yield Finding(
                here, f"has the same bytes as {other}", "keep one: inherit it, or share it by a relative symlink"
            )


def _links(tree: KernelTree) -> Iterator[Finding]:
    for package, root in sorted(tree.roots.items()):
        for path, target in sorted(root.links.items()):
            depth, lowest = path.count("/"), 0
            for part in target.split("/"):
                depth += -1 if part == ".." else 0 if part in ("", ".") else 1
                lowest = min(lowest, depth)
            if target.startswith("/") or lowest < 0:
                yield Finding(
                    f"{package}:{path}",
                    f"is a symlink to {target}, outside its root",
                    "link within the root, relatively",
                )


def _unused(tree: KernelTree, reached: set[str]) -> Iterator[Finding]:
    dormant = tuple(f"{folder.id}/" for folder in tree.dormant)
    for package, path, _ in _code(tree):
        here = f"{package}:{path}"
        # Core's shared headers wait for plugins that may not be installed.
        if (
            suffix(path) in HEADER_SUFFIXES
            and here not in reached
            and package != "atlas_core"
            and not here.startswith(dormant)
        ):
            yield Finding(here, "is included by no source", "delete it")
