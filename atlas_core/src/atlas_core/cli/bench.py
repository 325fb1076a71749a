"""``atlas bench``: what a server achieves, seen from its clients."""

import json
import sys
from typing import Any

import click

from atlas_core.assembly.environment import client_key
from atlas_core.bench.load import put_load
from atlas_core.bench.report import summarise, table
from atlas_core.bench.sample import Sample
from atlas_core.bench.workload import Workload
from atlas_core.remote.server import RemoteServer
from atlas_core.vocab.errors import EngineError


@click.group("bench")
def group() -> None:
    """Measure a running server."""


@group.command("serve")
@click.option("--url", default="http://127.0.0.1:8888", show_default=True, help="Any OpenAI-compatible server.")
@click.option("--model", default=None, help="Model to ask for. [default: the first that the server lists]")
@click.option("--api-key", default=None, help="Key that the server wants. [ATLAS_API_KEY]")
@click.option("--endpoint", type=click.Choice(["completions", "chat"]), default="completions", show_default=True)
@click.option("--requests", type=click.IntRange(min=1), default=100, show_default=True, help="Requests in all.")
@click.option("--concurrency", type=click.IntRange(min=1), default=8, show_default=True, help="Most under way at once.")
@click.option("--rate", type=float, default=None, help="Arrivals a second, at random. [default: as places get free]")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="About; words.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Of each answer.")
@click.option("--ignore-eos", is_flag=True, help="Ask for answers of full length; not every server can.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and arrivals.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds to wait for the next bytes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def serve(url: str, model: str | None, api_key: str | None, timeout: float, as_json: bool, **sizes: Any) -> int:
    """Load a server and show throughput and latencies. Exits 9 when no request was answered, 1 when some failed.

    Requests are streamed, so that the first token and every later one are seen when they come. Proxy variables are not used.
    """
    server = RemoteServer(url, api_key=api_key or client_key(), timeout=timeout)
    workload = Workload(model or server.models()[0], **sizes)
    label = f"{workload.requests} requests to {server.url}"
    with click.progressbar(length=workload.requests, label=label, file=sys.stderr) as bar:
        samples = put_load(server, workload, lambda sample: bar.update(1))
    summary = summarise(samples)
    if not summary.succeeded:
        cure = "correct the request (--prompt-tokens and --model among others), or see the server's log"
        raise EngineError(f"none of {summary.requests} requests was answered", _first(samples), cure)
    if as_json:
        click.echo(json.dumps(summary.as_json(workload, server.url), indent=1))
    else:
        click.echo("\n".join(table(summary)))
    return 0 if summary.succeeded == summary.requests else 1


def _first(samples: list[Sample]) -> str:
    return next(sample.error for sample in samples)
