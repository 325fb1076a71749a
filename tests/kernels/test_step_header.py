"""The header that kernels read counts and slots by says what core writes."""

import re
from importlib.resources import files

from atlas_core.ops.step import TABLE_START, Count, Word


def test_the_numbers_are_those_of_core():
    text = (files("atlas_core.kernels") / "include" / "atlas_step.h").read_text()
    found = {name: int(number) for name, number in re.findall(r"ATLAS_(\w+) = (\d+)", text)}
    assert found == {**{field.name: int(field) for field in (*Count, *Word)}, "TABLE_START": TABLE_START}
    assert max(Word) < TABLE_START
