"""Values a little way off from good ones. Everything is drawn from the Random that is handed in."""

import copy
import json
from collections.abc import Sequence
from random import Random
from typing import Any

ODD = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 1.5, -0.0, 1e308, 1e-320, "", " ", "\x00", "\n\n", "é😀", "\u2028",
    "a" * 300, "{", "}", '"', "\\", "null", "{}", "[]", "[1]", '{"a": 1}', "<eos>", "<bos>", "<think>", "</think>", "<tool_call>",
    "</tool_call>", "<function=", "{{ 7 * 7 }}", "{% raw %}", "http://127.0.0.1/x.png", "file:///etc/hostname", "data:image/png;base64,",
    [], {}, [[]], [{}], {"type": "text"}, {"type": "object"}, {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}},
    {"$ref": "#"}, {"type": ["string", "null"]}, {"type": "string", "pattern": "(a"},
)  # fmt: skip
NAMES = (
    "type", "role", "content", "text", "name", "id", "input", "tools", "tool_calls", "function", "arguments", "schema", "format", "n",
    "stream", "model", "stop", "seed", "logprobs", "thinking", "reasoning", "metadata", "store", "background", "include",
)  # fmt: skip


def mutated(value: Any, random: Random, pool: Sequence[Any]) -> Any:
    """A copy of the JSON ``value`` with one to four changes; parts of ``pool`` may be put into it."""
    found = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 4))):
        found = _changed(found, random, pool)
    return found


def mutated_text(text: str, random: Random, pool: Sequence[str]) -> str:
    """``text`` with pieces left out, doubled, put in, or changed."""
    for _ in range(random.choice((0, 1, 1, 2, 3))):
        start = random.randint(0, len(text))
        end = min(len(text), start + random.choice((0, 1, 1, 2, 5, 20)))
        other = random.choice(pool)
        at = random.randint(0, len(other))
        middle = random.choice(
            ("", text[start:end] * 2, other[at : at + random.randint(1, 12)], random.choice('{}[]"\\<>/=|\n ,:é\x00'))
        )
        text = text[:start] + middle + text[end:]
    return text


def cut(text: str, random: Random) -> list[str]:
    """``text`` in pieces of any size."""
    pieces = []
    while text:
        size = random.choice((1, 1, 2, 3, 5, 8, 30))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def mutated_bytes(value: Any, random: Random) -> bytes:
    """``value`` as JSON with bytes changed."""
    data = bytearray(json.dumps(value).encode())
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(data) + 1)
        data[at : at + random.randint(0, 2)] = random.choice(
            (b"", b"\xff", b"\\ud83c", b"NaN", b"[", b"}", b'"', b"\x00", b"1e999")
        )
    return bytes(data)


def _changed(value: Any, random: Random, pool: Sequence[Any]) -> Any:
    """One change, at a place below ``value`` or of it."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        name = random.choice(list(value))
        kind = random.random()
        if kind < 0.1:
            del value[name]
        elif kind < 0.2:
            value[random.choice(NAMES)] = _new(random, pool)
        else:
            value[name] = _changed(value[name], random, pool)
        return value
    if isinstance(value, list) and value and random.random() < 0.9:
        at = random.randrange(len(value))
        kind = random.random()
        if kind < 0.1:
            del value[at]
        elif kind < 0.2:
            value.insert(at, copy.deepcopy(value[at]))
        elif kind < 0.3:
            value.append(_new(random, pool))
        else:
            value[at] = _changed(value[at], random, pool)
        return value
    if isinstance(value, str) and random.random() < 0.5:
        return mutated_text(value, random, ("<tool_call>", '{"name": "ping"}', "[/INST]", "<eos>", value))
    return _new(random, pool)


def _new(random: Random, pool: Sequence[Any]) -> Any:
    if random.random() < 0.7:
        return copy.deepcopy(random.choice(ODD))
    found = random.choice(pool)
    while isinstance(found, dict | list) and found and random.random() < 0.7:
        found = random.choice(list(found.values()) if isinstance(found, dict) else found)
    return copy.deepcopy(found)
