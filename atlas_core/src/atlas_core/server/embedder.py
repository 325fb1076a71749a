"""Vectors from an engine whose model embeds texts."""

import array
import sys
import uuid
from collections.abc import Callable, Sequence

from atlas_core.server.ports import Engine
from atlas_core.vocab.errors import EngineError
from atlas_core.vocab.messages import Generate
from atlas_core.vocab.sampling import SamplingParams

_NOTHING = SamplingParams(temperature=0.0, max_tokens=0)


class EngineEmbedder:
    """A ports.Embedder over an engine that says ``vector_size``."""

    def __init__(self, engine: Engine, clock: Callable[[], float], *, normalised: bool, prompt: str) -> None:
        """``clock`` is monotonic, seconds; see ports.Embedder for the others."""
        self.size = engine.info.vector_size
        self.normalised = normalised
        self.prompt = prompt
        self._engine = engine
        self._clock = clock

    async def embed(self, ids: tuple[int, ...], /) -> Sequence[float]:
        """See ports.Embedder."""
        request = Generate(f"embd-{uuid.uuid4().hex}", ids, _NOTHING, self._clock(), embed=True)
        stream = self._engine.generate(request)
        try:
            async for delta in stream:
                if delta.vector:
                    return _floats(delta.vector)
        finally:
            await stream.aclose()
        raise EngineError(
            "the engine ended the request early", "it gave no vector", "send it again", state=self._engine.state
        )


def _floats(data: bytes) -> Sequence[float]:
    values = array.array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
