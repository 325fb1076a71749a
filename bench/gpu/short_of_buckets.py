"""Prompts that are shorter than the bucket that they run in end on this GPU: a warp that waits for a tile that nobody fetches waits for ever.

    timeout 60 python bench/gpu/short_of_buckets.py CONFIG.json [--hardware hopper] [BUCKET,TOKENS ...]

Conformance runs products in buckets that are full but for a few tokens, and timings in full ones. What hangs here is ended by ``timeout``.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from decode_step import Bench

SIZES = ((2048, 1856), (8192, 8000), (384, 300), (320, 290), (512, 420))
ARCHS = {"hopper": "sm_90a", "gb10": "sm_121a"}
CONTEXT, VOCABULARY = 2048, 32000


def pair(text: str) -> tuple[int, int]:
    """A bucket's tokens, and those of the prompt. Raises ValueError."""
    bucket, _, tokens = text.partition(",")
    return int(bucket), int(tokens)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("sizes", nargs="*", type=pair, default=SIZES)
    parser.add_argument("--hardware", choices=sorted(ARCHS), default="hopper")
    options = parser.parse_args()
    config = json.loads(options.config.read_text())
    for bucket, tokens in options.sizes:
        bench = Bench(config, options.hardware, ARCHS[options.hardware], 1, max(CONTEXT, bucket), bucket)
        prompt = np.random.default_rng(1).integers(0, VOCABULARY, tokens).tolist()
        began = time.perf_counter()
        bench.run(bench.step([prompt], bench.reset(0)))
        print(
            f"{tokens} tokens in a bucket of {bucket}: ended after {(time.perf_counter() - began) * 1e3:.0f} ms",
            flush=True,
        )
        bench.close()


if __name__ == "__main__":
    main()
