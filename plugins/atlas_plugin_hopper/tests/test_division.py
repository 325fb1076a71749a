"""How attention is divided among blocks, by the kernel's own header on this CPU."""

import random
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

import atlas_core.kernels
import atlas_plugin_hopper
from atlas_plugin_cpu.toolchain import CpuComputeTarget

HERE = Path(__file__).parent / "division"
HEADERS = (
    HERE, Path(atlas_plugin_hopper.__file__).parent / "kernels/hopper/common", Path(atlas_core.kernels.__file__).parent / "include",
)  # fmt: skip
ROWS = KEYS = 128
LONG, OVERHEAD, SNAP = 12, 6, 5
"""Tiles of keys from which on they may be divided; in halves of a tile, what an item costs besides and how late a share may end."""

Sequences = list[tuple[int, int]]
Answers = list[list[int]]
Divide = Callable[[int, int, int, int, Sequences], Answers]

# Where zig is the compiler, its first program waits for its C++ library to be built.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def divide(tmp_path_factory: pytest.TempPathFactory) -> Divide:
    """``divide(blocks, kv_heads, heads, window, [(queries, before) ...])`` is the numbers of each line that host.cpp prints."""
    program = tmp_path_factory.mktemp("division") / "host"
    command = [
        *CpuComputeTarget().find_compiler().command,
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Werror",
        "-Wno-unknown-pragmas",
    ]
    subprocess.run(
        [*command, *(f"-I{path}" for path in HEADERS), str(HERE / "host.cpp"), "-o", str(program)], check=True
    )

    def run(blocks: int, kv_heads: int, heads: int, window: int, sequences: Sequences) -> Answers:
        step = [blocks, kv_heads, heads, window, len(sequences), *(n for each in sequences for n in each)]
        said = subprocess.run([program], input=" ".join(map(str, step)), check=True, capture_output=True, text=True)
        return [[int(number) for number in line.split()[1:]] for line in said.stdout.splitlines()]

    return run


def held(divide: Divide, blocks: int, kv_heads: int, heads: int, window: int, sequences: Sequences) -> list[int]:
    """Every key of every tile of queries is one block's; gives the cost of each block's items."""
    first, *items, last = divide(blocks, kv_heads, heads, window, sequences)
    assert last == [0], "the counter begins at zero for the next launch"
    assert first[0] * blocks >= first[1], "the shares hold the whole line"
    found: dict[tuple[int, int, int], list[list[int]]] = defaultdict(list)
    work = [0] * blocks
    places = set()
    for block, sequence, query, kv_head, newest, count, first_block, part, parts in items:
        found[sequence, query, kv_head].append([part, newest, count, first_block, parts])
        assert block == first_block + part
        assert count > 0
        work[block] += 2 * count + OVERHEAD
        if parts > 1:
            place = 2 * block + (part == 0)
            assert place not in places, "two items would leave their sums in one place"
            places.add(place)
    tile = ROWS // heads
    for sequence, (queries, before) in enumerate(sequences):
        for query in range(0, queries, tile):
            length = before + min(query + tile, queries)
            oldest = max(0, before + query - window + 1) // KEYS * KEYS if window else 0
            for kv_head in range(kv_heads):
                parts = sorted(found.pop((sequence, query, kv_head)))
                assert [part[0] for part in parts] == list(range(parts[0][4]))
                newest = (length - 1) // KEYS * KEYS
                for _, begin, count, first_block, of in parts:
                    assert (begin, first_block, of) == (newest, parts[0][3], parts[0][4])
                    newest -= count * KEYS
                assert newest == oldest - KEYS
    assert not found
    return work


def test_every_key_is_one_blocks(divide: Divide) -> None:
    rng = random.Random(7)
    for _ in range(120):
        sequences = [
            (1, rng.randint(0, 3000)) if rng.random() < 0.6 else
            (rng.choice([0, 1, 5, 100, 350, rng.randint(1, 1500)]), rng.choice([0, rng.randint(0, 40000)]))
            for _ in range(rng.randint(1, 40))
        ]  # fmt: skip
        shape = rng.choice([132, 114, 7, 1]), rng.choice([1, 2, 8]), rng.choice([1, 4, 7, 16])
        held(divide, *shape, rng.choice([0, 128, 1000, 4096]), sequences)


@pytest.mark.parametrize(("queries", "before"), [(352, 7640), (224, 7776), (464, 7168)])
def test_a_late_piece_of_a_prompt_is_shared_evenly(divide: Divide, queries: int, before: int) -> None:
    work = held(divide, 132, 8, 4, 0, [(queries, before)])
    assert max(work) <= sum(work) / 132 + SNAP + 3


def test_short_sequences_are_drawn_whole(divide: Divide) -> None:
    sequences = [(1, 700)] * 32 + [(300, 100)]
    (_, line, drawn), *items, _ = divide(132, 8, 4, 0, sequences)
    assert (line, drawn) == (0, 8 * 42)
    assert {item[-1] for item in items} == {1}


def test_so_many_tiles_that_they_share_themselves_out_are_drawn_whole(divide: Divide) -> None:
    (_, line, drawn), *_ = divide(132, 8, 4, 0, [(2048, 6144)])
    assert (line, drawn) == (0, 512)


def test_one_long_context_is_divided_among_many(divide: Divide) -> None:
    work = held(divide, 132, 8, 4, 0, [(1, 30000)] + [(1, 100)] * 3)
    assert sum(cost >= 2 * LONG for cost in work) >= 100
