"""The generated header that is forced into every source: the compiler, not a reviewer, proves that signatures agree."""

from collections.abc import Mapping, Sequence

from atlas_core.contracts.compute_target import ComputeTarget
from atlas_core.kernels.manifest import EntryDecl

_SCALARS: Mapping[str, str] = {"i32": "int32_t", "u32": "uint32_t", "i64": "int64_t", "f32": "float"}


def c_type(declared: str) -> str:
    """The C type of a declared parameter type: ``i32`` → ``int32_t``, ``ptr<const float>`` → ``const float*``.

    For the ComputeTargets of C-like languages. Raises KeyError for a type that manifests do not know.
    """
    if declared == "ptr":
        return "void*"
    if declared.startswith("ptr<"):
        return f"{declared[4:-1]}*"
    return _SCALARS[declared]


def c_parameters(params: Sequence[tuple[str, str]]) -> str:
    """``const float* x, int32_t hidden``: the C parameter list of (type, name) pairs."""
    return ", ".join(f"{c_type(declared)} {name}" for declared, name in params)


def prototype_header(target: ComputeTarget, module: str, entries: Sequence[EntryDecl]) -> str:
    """The header for one module: a banner, then the target's prototype of every entry, in declared order."""
    parts = [
        f"// Generated from KERNEL.toml for {module}: the declarations that its source must agree with.\n#pragma once\n"
    ]
    for entry in entries:
        text = target.prototype(entry.name, [(param.type, param.name) for param in entry.params])
        parts.append(text.rstrip() + "\n")
    return "\n".join(parts)
