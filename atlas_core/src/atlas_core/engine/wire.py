"""Messages as bytes: a frame is its length (4 bytes, little endian) and msgpack of (type name, value).

The only place that knows the encoding. Both sides begin with Hello; a peer of another version is refused, so a message
is never guessed at.
"""

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from atlas_core.plugins.identity import Identity, difference
from atlas_core.vocab.errors import EngineError
from atlas_core.vocab.messages import Abort, Drain, Faulted, Generate, Hello, Progress, Ready, StepResult

VERSION = 5
MAX_FRAME = 64 << 20
"""Bytes. A prompt of a million tokens takes five."""

_LENGTH = struct.Struct("<I")


class Configure(Struct, frozen=True):
    """How to build the engine: ``build`` is ``module:attr`` of a serving.Build, ``settings`` its first argument."""

    build: str
    settings: bytes


Message = Hello | Configure | Generate | Abort | Drain | Progress | Ready | StepResult | Faulted

_TYPES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Hello, Configure, Generate, Abort, Drain, Progress, Ready, StepResult, Faulted)
}
_ENCODER = msgspec.msgpack.Encoder()
_ENVELOPE = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_DECODERS = {name: msgspec.msgpack.Decoder(kind) for name, kind in _TYPES.items()}


def encode(message: Message) -> bytes:
    """A whole frame.

    Raises EngineError for a value that cannot be sent (a number beyond 64 bits, half a character, too long).
    """
    name = type(message).__name__
    try:
        payload = _ENCODER.encode((name, message))
    except (OverflowError, ValueError, TypeError) as error:
        raise EngineError(f"a {name} cannot be encoded", str(error)) from error
    if len(payload) > MAX_FRAME:
        raise EngineError(f"a {name} of {len(payload)} bytes is too long", f"a frame has at most {MAX_FRAME} bytes")
    return _LENGTH.pack(len(payload)) + payload


def decode(payload: bytes) -> Message:
    """The message of one frame, without its length.

    Raises EngineError for an unknown type or a value that is not of it.
    """
    try:
        name, value = _ENVELOPE.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"a frame of {len(payload)} bytes is no message", str(error)) from error
    decoder = _DECODERS.get(name)
    if decoder is None:
        raise EngineError(f"a message of unknown type {name!r} came", "the other side speaks another protocol")
    try:
        message: Message = decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"a {name} is malformed", str(error)) from error
    return message


def check_hello(message: Message, plugins: Identity = ()) -> Hello:
    """The peer's greeting.

    Raises EngineError when it is something else, of another version, or when the peer has other ``plugins`` installed.
    """
    if not isinstance(message, Hello):
        raise EngineError(
            f"the peer began with {type(message).__name__} instead of Hello", "it speaks another protocol"
        )
    if message.version != VERSION:
        raise EngineError(
            f"the peer speaks version {message.version} and this is version {VERSION}",
            "the two processes run different releases of Atlas",
            "run both from one environment",
        )
    differing = difference(plugins, message.plugins)
    if differing:
        raise EngineError(
            "the API process and the engine process do not have the same plugins",
            differing,
            "something was installed or changed while Atlas started: start it again",
        )
    return message


class Frames:
    """Cuts a stream of bytes into payloads, however it arrives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Every payload that ``data`` completes.

        Raises EngineError as soon as a frame announces more than MAX_FRAME bytes.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise EngineError(f"a frame of {length} bytes is announced", f"at most {MAX_FRAME} are taken")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield payload
