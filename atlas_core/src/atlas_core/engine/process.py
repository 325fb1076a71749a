"""The engine process: ``python -m atlas_core.engine.process --socket PATH``.

It lives for its API process only. When the socket ends, for whatever reason, it exits at once, so that no orphan holds
a device; where the kernel can (Linux), it is killed with its parent even if it cannot run any code.
"""

import argparse
import ctypes
import gc
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from atlas_core.plugins.load import load
from atlas_core.vocab.errors import AtlasError

if TYPE_CHECKING:
    from atlas_core.engine.loop import Engine
    from atlas_core.engine.serving import Build, Report

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    """Serve one connection; the exit status is 0 when it ended in good order."""
    parser = argparse.ArgumentParser(prog="atlas_core.engine.process", description="the engine of an Atlas server")
    parser.add_argument("--socket", required=True, help="the Unix socket on which the API process listens")
    parser.add_argument(
        "--prepare", default="", help="MODULE:ATTR of (bytes | None) → Build, called with early settings"
    )
    parser.add_argument("--early", action="store_true", help="standard input has the settings that will be ordered")
    arguments = parser.parse_args()
    # Nothing here multiplies matrices by numpy, and its threads would keep a processor busy while others import and read.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()  # until it is ready: a start makes hundreds of thousands of objects, which all stay
    early = sys.stdin.buffer.read() if arguments.early else None
    # A terminal's Ctrl-C and a supervisor's TERM reach the whole group; the API process drains, then closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_parent()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(arguments.socket)
    build = _prepared(arguments.prepare, early) if arguments.prepare else None
    # Not before: it takes half a second, in which a disk may be reading.
    from atlas_core.engine.serving import serve
    from atlas_core.plugins import installed

    served = serve(connection, closed=lambda: os._exit(0), ready=_freeze, build=build, plugins=installed(), early=early)
    return 0 if served else 1


def _prepared(target: str, early: bytes | None) -> "Build":
    """What ``target`` gives; when it fails, a build that fails so, since the other side is to hear of it and not the log alone."""
    try:
        build: Build = load(target, "atlas-core")(early)
    except AtlasError as error:
        failure = error

        def build(settings: bytes, report: "Report") -> "Engine":
            raise failure

    return build


def _freeze() -> None:
    """What is built so far lives as long as the process: keep the garbage collector from walking it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _die_with_parent() -> None:
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


if __name__ == "__main__":
    sys.exit(main())
