"""How far fast numerics are from exact ones, beside llama.cpp on the same file.

    python bench/cpu_quality.py --peer peer/bin/python --model FILE.gguf --prompts tests/data/goldens/smollm2.json

The reference is Atlas in exact numerics, which tests hold to the fp32 model. For prefixes of the golden texts, the mean of
KL(reference || engine) over the next token, in nats, and how often the most likely token is the reference's. Both engines
answer for the same prefixes, so their difference is taken prefix by prefix: its error is smaller than that of either mean.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from cpu.children import Engines

Array = np.ndarray


def prefixes(file: Path, every: int, longest: int) -> list[list[int]]:
    """Beginnings of every golden text, prompt and continuation, ``every`` tokens apart."""
    found = []
    for prompt in json.loads(file.read_text("utf-8"))["prompts"]:
        tokens = [*prompt["prompt_ids"], *prompt["generated_ids"]][:longest]
        found += [tokens[:end] for end in range(2, len(tokens) + 1, every)]
    return found


def logits(engines: Engines, name: str, model: Path, prompts: list[list[int]], folder: Path) -> Array:
    """float64 log-probabilities [prompt, vocabulary]."""
    target = folder / "logits.npy"
    with engines.start(name, model, 1) as child:
        child.ask(what="logits", prompts=prompts, to=str(target))
    values = np.load(target).astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    normal: Array = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    return normal


def main() -> None:
    """See the module's docstring. Ends with 1 when Atlas is further off than llama.cpp."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="a Python that has llama-cpp-python")
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--every", type=int, default=1, help="tokens between prefixes")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest prefix")
    arguments = parser.parse_args()
    prompts = prefixes(arguments.prompts, arguments.every, arguments.longest)
    with tempfile.TemporaryDirectory() as folder:

        def measured(name: str, numerics: str) -> Array:
            return logits(Engines(arguments.peer, numerics), name, arguments.model, prompts, Path(folder))

        reference = measured("atlas", "exact")
        print(f"{arguments.model.name}: {len(prompts)} prefixes")
        divergences = {}
        for name in Engines.names:
            found = measured(name, "fast")
            divergences[name] = (np.exp(reference) * (reference - found)).sum(axis=1)
            agree = np.mean(found.argmax(axis=1) == reference.argmax(axis=1))
            print(f"    {name:<6} mean KL {_mean(divergences[name])}, same first choice {agree:.1%}")
    difference = divergences["atlas"] - divergences["peer"]
    worse = difference.mean() > 0
    print(
        f"    atlas less peer, prefix by prefix: {_mean(difference)}; goal: not above 0: {'MISSED' if worse else 'ok'}"
    )
    raise SystemExit(int(worse))


def _mean(values: Array) -> str:
    """A mean with its standard error."""
    return f"{values.mean():.2e} ± {values.std() / np.sqrt(len(values)):.1e}"


if __name__ == "__main__":
    main()
