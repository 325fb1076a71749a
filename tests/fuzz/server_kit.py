"""The pieces that the server's tests are made of: their conftest, under a name of its own, as pytest has others called so."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

_SPEC = importlib.util.spec_from_file_location(
    "server_conftest", Path(__file__).resolve().parents[1] / "server" / "conftest.py"
)
_MODULE: Any = sys.modules.get("server_conftest")
if _MODULE is None:
    _MODULE = sys.modules["server_conftest"] = importlib.util.module_from_spec(_SPEC)
    _SPEC.loader.exec_module(_MODULE)
kit = _MODULE
