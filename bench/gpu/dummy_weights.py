"""What a device holds after ``--load-format dummy`` is what the host would have read, to the bit.

    python bench/gpu/dummy_weights.py MODEL [--hardware hopper] [--most 300]

MODEL is a directory with config.json. Of weights of more than MOST megabytes the first few are compared.
"""

import argparse
import time

import numpy as np

from atlas_core.assembly.engine import library_of, open_backend
from atlas_core.assembly.machine import choose_machine
from atlas_core.assembly.memory import ModelSource, Weights
from atlas_core.assembly.model import open_model
from atlas_core.assembly.plan import make_plan
from atlas_core.loading.upload import load_weights
from atlas_core.plugins import discover
from atlas_core.runtime.loader import pack_weight
from atlas_core.settings import read_settings

LARGE = 4


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--hardware", default="hopper")
    parser.add_argument("--most", type=float, default=300.0)
    options = parser.parse_args()
    flags = {"model": options.model, "hardware": options.hardware, "load_format": "dummy", "max_seq_len": "512"}
    settings, registry = read_settings(flags, {}), discover()
    machine = choose_machine(registry, options.hardware)
    model = open_model(registry, settings, lambda done, total, note: None)
    plan = make_plan(model, machine, settings)
    weights = Weights.of(plan, model)
    source = ModelSource(model, weights)
    backend = open_backend(machine, library_of(machine, model), plan.settings)
    began = time.perf_counter()
    memory = load_weights(backend, weights.copies, source)
    print(f"{len(weights.copies)} weights, {weights.nbytes / 1e9:.2f} GB, made in {time.perf_counter() - began:.2f} s")
    large = compared = 0
    wrong = []
    for copy in weights.copies:
        large += copy.packed.nbytes > options.most * 1e6
        if copy.packed.nbytes > options.most * 1e6 and large > LARGE:
            continue
        got = np.empty(copy.packed.nbytes, np.uint8)
        backend.copy_d2h(memory.address(copy), got.data)
        data = source.read(copy.weight)
        want = np.frombuffer(pack_weight(copy.implementation, copy.packed, copy.spec, copy.weight, data), np.uint8)
        compared += 1
        if not np.array_equal(got, want):
            wrong.append(f"{copy.weight} from byte {int(np.flatnonzero(got != want)[0])} on")
    memory.free()
    backend.close()
    print(f"{compared} compared, {len(wrong)} differ {wrong[:5]}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
