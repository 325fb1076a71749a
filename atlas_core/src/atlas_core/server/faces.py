"""What a face is: a way to read requests and to write answers. Everything between is the same for all of them."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from atlas_core.server.answer import Reading
from atlas_core.server.ports import ServedModel
from atlas_core.server.schema import Request
from atlas_core.server.turn import Output, Prompt, Turn
from atlas_core.vocab.errors import AtlasError
from atlas_core.vocab.messages import Delta, Ready

R = TypeVar("R", bound=Request)


class ChunkWriter(Protocol):
    """The events of one stream. Joined, they say what the whole answer says, however the deltas are cut."""

    @property
    def ping(self) -> bytes:
        """What shows, while nothing else is sent, that the connection lives."""
        ...

    def opening(self) -> bytes:
        """Zero or more events that follow the headers at once, before the first delta is there."""
        ...

    def chunk(self, index: int, delta: Delta) -> bytes:
        """Zero or more events for what choice ``index`` gained."""
        ...

    def closing(self, outputs: Sequence[Output]) -> bytes:
        """Everything behind the last delta, the mark of the end among it where clients expect one."""
        ...

    def failed(self, error: AtlasError) -> bytes:
        """The last events of a stream that broke off; never nothing, so that no client takes it for a whole one."""
        ...


class Face(Protocol[R]):
    """One endpoint that generates."""

    @property
    def id_prefix(self) -> str:
        """What ids of its answers begin with."""
        ...

    def read(self, body: Mapping[str, Any]) -> tuple[R, list[str]]:
        """The request in ``body``, and the names of what in it is unknown and has no effect. Raises RequestError that names the field."""
        ...

    def count(self, request: R) -> int:
        """How many prompts there are, told without reading them. Raises RequestError."""
        ...

    def reading(self, request: R, model: ServedModel) -> Reading:
        """How its answers are taken apart. Raises RequestError."""
        ...

    def quick(self, request: R) -> bool:
        """Whether ``prompts`` takes less long than handing it to another thread, which waits for all that this one does meanwhile."""
        ...

    def prompts(self, request: R, model: ServedModel, info: Ready) -> list[Prompt]:
        """Render, encode, compile grammars; runs off the event loop unless it is quick, since all of that may take long. Raises RequestError."""
        ...

    def whole(self, turn: Turn, outputs: Sequence[Output]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...

    def writer(self, turn: Turn) -> ChunkWriter:
        """A writer for one stream."""
        ...
