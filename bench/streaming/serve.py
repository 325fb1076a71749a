"""The API process: the whole server, over an engine process of streaming.engine."""

import json
import sys
import time

from atlas_core.engine.client import ProcessClient
from atlas_core.server.app import Application
from atlas_core.server.listen import bind_socket
from atlas_core.server.options import ServerOptions
from atlas_core.server.ports import OnProgress, ServedModel, Service
from atlas_core.server.run import run
from atlas_core.text.template import ChatTemplate
from atlas_core.vocab.messages import Progress, Ready
from streaming.engine import Stamps

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class Printer:
    """A reporter that says where the server is, once it is there."""

    def progress(self, progress: Progress) -> None:
        """Of no interest."""

    def ready(self, url: str, info: Ready) -> None:
        """Say where."""
        print(url, flush=True)

    def notice(self, text: str) -> None:
        """Of no interest."""


def main(settings: str) -> None:
    """Serve until told to end; ``settings`` are those of the engine."""
    asked = json.loads(settings)

    async def bring_up(on_progress: OnProgress) -> Service:
        client = ProcessClient("streaming.engine:build", settings.encode())
        await client.start(on_progress)
        return Service(client, ServedModel(("paced",), Stamps(), ChatTemplate(TEMPLATE, {}, strftime=time.strftime), 0))

    options = ServerOptions(max_queue=asked["streams"])
    run(Application(bring_up, options, Printer()), bind_socket("127.0.0.1", 0), log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1])
