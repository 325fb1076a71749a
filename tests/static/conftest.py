"""Gates that need no GPU: kernels are compiled for machines that are not here, and their binaries are read."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gpu_builds import GpuBuilds


@pytest.fixture(scope="session")
def builds(request: pytest.FixtureRequest) -> GpuBuilds:
    """Binaries of every NVIDIA hardware, compiled when first asked for and kept between runs by the key of their contents."""
    return GpuBuilds(request.config.cache.mkdir("gpu_kernels"))
