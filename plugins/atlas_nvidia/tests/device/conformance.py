"""Conformance of every implementation on the GPU of this machine, by core's runner: python conformance.py [FILTER].

Needs built kernels and a GPU; runs from a checkout with the sources on the path. Exits with 1 unless everything passed.
"""

import sys
import time

from atlas_core.conformance.run import Options, Subject, test
from atlas_core.contracts.declarations import KernelRoot
from atlas_core.kernels.library import KernelLibrary
from atlas_core.kernels.scan import scan
from atlas_core.vocab.target import Target
from atlas_nvidia.backend import open_backend
from atlas_nvidia.fused import fused_ops
from atlas_nvidia.implementations import implementations
from atlas_nvidia.implementations.base import ELEMENTS

ARCH = "sm_90a"


def library() -> KernelLibrary:
    """Kernels of the hardware hopper, without looking for installed plugins."""
    tree, places = scan([KernelRoot("atlas_nvidia"), KernelRoot("atlas_plugin_hopper")])
    return KernelLibrary(tree, places, Target("hopper", ARCH))


def main(filters: list[str]) -> int:
    """Run the trials whose id contains one of ``filters`` (none: all), print the table; 0 when everything passed."""
    backend = open_backend(library())
    print(backend.facts())
    subject = Subject(backend, implementations(), ARCH, "fast", fused_ops())
    ok = True
    for text in filters or [""]:
        began = time.perf_counter()
        options = Options(text, ELEMENTS)
        report = test(subject, options)
        print(report.table())
        print(f"{len(report.results)} trials in {time.perf_counter() - began:.1f} s")
        ok = ok and not report.failures and not report.lost
    backend.close()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
