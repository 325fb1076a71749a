"""Sends whatever the API document allows, and what it does not, to a server with a scripted engine.

Every answer must have a status, a type and a body that the document knows, and none may be a 5xx that it does not explain.
Run by ``make fuzz``: ``python tests/fuzz/api.py SECONDS``.
"""

import contextlib
import logging
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from server_kit import kit

from atlas_core.server.options import ServerOptions
from atlas_core.server.ports import OnProgress, Service

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
KEY = "fuzz"


class Embedder:
    """The vector of a prompt is its length and its first id."""

    size = 2
    normalised = True
    prompt = ""

    async def embed(self, ids: tuple[int, ...], /) -> Sequence[float]:
        return [float(len(ids)), float(ids[0])]


def main(seconds: int) -> int:
    logging.getLogger("atlas").setLevel(logging.CRITICAL)
    # Short answers: what is looked for is in what comes before and after them.
    engine = kit.FakeEngine(lambda request: kit.deltas(request, chunk=8), slots=8)
    model = kit.model(speech=kit.speech("<tool_call>\n{name} <think>"))

    async def bring_up(on_progress: OnProgress) -> Service:
        return Service(engine, model, Embedder())

    server = kit.Running(engine, ServerOptions(api_keys=(KEY,), max_body=2**20), model, bring_up).wait()
    # It keeps what it found in a folder of where it runs.
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        return subprocess.run(
            [
                str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json", "--max-time", str(seconds),
                "--checks", CHECKS, "-H", f"x-api-key: {KEY}", "--workers", "2", "--continue-on-failure", "--no-color",
                "--request-timeout", "20", "--suppress-health-check", "all", "--warnings", "off",
            ],
            check=False, cwd=folder,
        ).returncode  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
