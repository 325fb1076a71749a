"""A cubin, which is an ELF64 file: what is wanted of its header, its sections and its symbols. Fields as in the ELF-64 object file format."""

import struct
from dataclasses import dataclass

_MACHINE_CUDA = 190
_SYMBOL_TABLE = 2
_FUNCTION = 2
_CODE = ".text."
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


@dataclass(frozen=True)
class Symbol:
    """``defined`` is False for what a linker, here the driver, would have to find elsewhere."""

    name: str
    function: bool
    defined: bool


class Cubin:
    """``sm`` is the number of the architecture: 90 for sm_90a, 121 for sm_121a."""

    def __init__(self, data: bytes) -> None:
        header = _HEADER.unpack_from(data)
        assert header[0][:6] == b"\x7fELF\x02\x01", "not an ELF64 file of little endian"
        assert header[2] == _MACHINE_CUDA
        offset, flags, size, count = header[6], header[7], header[11], header[12]
        self.sm = flags >> 8 & 0xFF
        sections = [_SECTION.unpack_from(data, offset + i * size) for i in range(count)]
        names = sections[header[13]][4]
        named = {_text(data, names + section[0]): section for section in sections}
        self.code = {
            name.removeprefix(_CODE): data[section[4] : section[4] + section[5]]
            for name, section in named.items()
            if name.startswith(_CODE)
        }
        """Machine code by function."""
        self.symbols = [
            _symbol(data, at, sections[section[6]][4])
            for section in sections
            if section[1] == _SYMBOL_TABLE
            for at in range(section[4] + _SYMBOL.size, section[4] + section[5], _SYMBOL.size)
        ]

    @property
    def foreign(self) -> list[str]:
        """Functions that are called and lie elsewhere."""
        return [symbol.name for symbol in self.symbols if symbol.function and not symbol.defined]


def _symbol(data: bytes, at: int, strings: int) -> Symbol:
    name, info, _, section, _, _ = _SYMBOL.unpack_from(data, at)
    return Symbol(_text(data, strings + name), info & 0xF == _FUNCTION, section != 0)


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()
