"""Run in a process of its own: ``generate.py MODEL HARDWARE PROMPT COUNT [NAME=VALUE]`` prints the greedy continuation, as JSON.

Names and values are further settings.
"""

import asyncio
import json
import sys

from atlas_core.assembly.engine import build_engine
from atlas_core.assembly.settings import encode_settings
from atlas_core.engine.client import InProcessClient
from atlas_core.settings import read_settings
from atlas_core.vocab.messages import Generate
from atlas_core.vocab.sampling import SamplingParams


async def main(model: str, hardware: str, prompt: list[int], count: int, more: dict[str, str]) -> list[int]:
    own = {"model": model, "hardware": hardware, "max_batch_size": "2", "start_cache": "none"}
    settings = read_settings({**own, **more}, {})
    client = InProcessClient(build_engine, encode_settings(settings))
    await client.start(lambda progress: None)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        deltas = client.generate(Generate("only", tuple(prompt), params))
        return [token async for delta in deltas for token in delta.tokens]
    finally:
        await client.close()


model, hardware, prompt, count, *pairs = sys.argv[1:]
more = dict(pair.split("=", 1) for pair in pairs)
sys.stdout.write(json.dumps(asyncio.run(main(model, hardware, json.loads(prompt), int(count), more))))
