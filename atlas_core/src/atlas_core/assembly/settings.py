"""Settings on their way to the engine process."""

from pathlib import Path

import msgspec
from msgspec.structs import replace

from atlas_core.settings import Settings


def encode_settings(settings: Settings) -> bytes:
    """As bytes; keys of clients stay behind, since the engine has no use for them."""
    return msgspec.msgpack.encode(replace(settings, api_key=()))


def engine_settings(settings: Settings, path: Path) -> bytes:
    """What the engine of a server is told once the model lies at ``path``."""
    return encode_settings(replace(settings, model=str(path), revision=None))


def decode_settings(data: bytes) -> Settings:
    """The settings that were encoded."""
    return msgspec.msgpack.decode(data, type=Settings)
