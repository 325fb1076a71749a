"""The garbage collector, while a start makes hundreds of thousands of objects that all stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_waiting() -> Iterator[None]:
    """No collections inside: each would walk everything made so far, and find next to nothing. A seventh of a small model's start."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
