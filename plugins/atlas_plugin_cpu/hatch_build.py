# ruff: noqa: INP001  hatchling runs this file by its path
"""Puts the compiled kernels of this distribution into its wheel, and refuses when they are missing or stale.

It compiles nothing and imports nothing of Atlas: a wheel is built in an environment of its own. ATLAS_SKIP_BUILD=1
makes a wheel of sources alone. Builds for the very machine (``native-…``) stay at home, and so do those for another
kind of machine.
"""

import hashlib
import json
import os
import platform
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Repeats atlas_plugin_cpu.archs, which a build cannot import; a test compares the two.
_MACHINES = {"x86-64": "x86_64", "aarch64": "aarch64"}
"""The machine of a wheel, by how the names of a processor's architectures begin; other devices go into any machine."""


class KernelBinaries(BuildHookInterface[Any]):
    """The wheel gets every binary that a manifest.json names, after all of them were checked."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before the wheel is written; an editable install needs no binaries yet."""
        if version == "editable" or os.environ.get("ATLAS_SKIP_BUILD", "").lower() not in ("", "0", "false", "no"):
            return
        kernels = next(Path(self.root, "src").glob("*/kernels"))
        for hardware, layer, archs in _wanted(kernels):
            found = sorted(kernels.parent.glob(f"_compiled/{hardware}/*/{layer}/manifest.json"))
            kept = [path for path in found if _travels(path.relative_to(kernels.parent).parts[2], archs)]
            if not kept:
                self.app.abort(
                    f"{kernels.parent.name}: no kernels of {hardware}/{layer} to package.\n"
                    f"  cure: atlas kernels build --hw {hardware} --arch ARCH, or ATLAS_SKIP_BUILD=1 for sources alone"
                )
            for manifest in kept:
                self._add(kernels, manifest, build_data)

    def _add(self, kernels: Path, manifest: Path, build_data: dict[str, Any]) -> None:
        content = json.loads(manifest.read_text("utf-8"))
        expected = dict(content["declarations"])
        for module in content["modules"].values():
            expected |= module["files"]
        own = f"{kernels.parent.name}:"
        checks = {kernels / path.removeprefix(own): digest for path, digest in expected.items() if path.startswith(own)}
        checks |= {manifest.parent / module["file"]: module["sha256"] for module in content["modules"].values()}
        for path, digest in checks.items():
            if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                self.app.abort(
                    f"{manifest}: {path} is missing or not what was compiled.\n"
                    f"  cure: atlas kernels build --hw {content['hardware']} --arch {content['arch']}"
                )
        outputs = [manifest, *(manifest.parent / module["file"] for module in content["modules"].values())]
        build_data["artifacts"] += [f"/{path.relative_to(self.root).as_posix()}" for path in outputs]
        machine = _machine(content["arch"])
        if machine is not None:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-linux_{machine}"


def _travels(arch: str, archs: Sequence[str] | None) -> bool:
    """Whether binaries for ``arch`` are for others; what the machine declares no more is a leftover."""
    return (
        not arch.startswith("native-")
        and (archs is None or arch in archs)
        and _machine(arch) in (None, platform.machine())
    )


def _machine(arch: str) -> str | None:
    return next((machine for name, machine in _MACHINES.items() if arch.startswith(name)), None)


def _wanted(kernels: Path) -> list[tuple[str, str, Sequence[str] | None]]:
    """(hardware, layer, declared architectures) of what this distribution brings: its machines' common layers, its leaves.

    Architectures are None for leaves of a machine that another distribution declares.
    """
    machines = {
        path.parent.name: tomllib.loads(path.read_text("utf-8"))["hardware"]
        for path in sorted(kernels.glob("*/HARDWARE.toml"))
    }
    archs = {name: hardware["archs"] for name, hardware in machines.items()}
    leaves = [path.parent.relative_to(kernels).parts for path in sorted(kernels.glob("*/*/*/KERNEL.toml"))]
    return [
        *((name, "common", archs[name]) for name, hardware in machines.items() if not hardware.get("abstract", False)),
        *((hardware, f"{model}/{quant}", archs.get(hardware)) for hardware, model, quant in leaves),
    ]
