"""What importing a plugin module drags in: listing plugins must cost nothing but their own few lines."""

import json
import subprocess
import sys

_ALLOWED = (
    "pluggy", "msgspec", "typing_extensions", "atlas_core.vocab", "atlas_core.contracts", "atlas_core.hookspecs",
    "atlas_core.builtins",
)  # fmt: skip
"""What hooks and values are made with, and core's modules that have nothing else."""
_SCRIPT = """
import importlib, json, sys
before = set(sys.modules)
importlib.import_module(sys.argv[1])
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def footprint(module: str) -> tuple[str, ...]:
    """Modules, beyond those that a plugin module may import, that importing ``module`` loads in a fresh interpreter.

    Allowed are the standard library, pluggy, msgspec with what it imports, core's vocab, contracts and hookspecs, and ``module`` with its parents. An
    empty answer is a pass. Raises ImportError, with the child's words, when ``module`` does not import.
    """
    child = subprocess.run([sys.executable, "-P", "-c", _SCRIPT, module], capture_output=True, text=True, check=False)
    if child.returncode != 0:
        raise ImportError(child.stderr.strip())
    parts = module.split(".")
    own = {".".join(parts[:end]) for end in range(1, len(parts) + 1)} | {"atlas_core"}
    return tuple(name for name in json.loads(child.stdout) if name not in own and not _allowed(name))


def _allowed(name: str) -> bool:
    if name.partition(".")[0] in sys.stdlib_module_names:
        return True
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in _ALLOWED)
