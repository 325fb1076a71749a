"""The golden engine: runs a step program with the references of its ops, in numpy. Slow, and beyond suspicion."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from atlas_core.model.program import Program

Array = np.ndarray[Any, Any]


class Interpreter:
    """Values of one step by name, and the nodes run so far.

    ``values`` starts with float32 weights, inputs, states (int32, the mask uint32) and caches [layer, page, 2, head, token, dim]; constants
    are the program's own. Arrays have live extents. States and caches are changed in place, activations are added.
    """

    def __init__(self, program: Program, values: Mapping[str, Array]) -> None:
        self._program = program
        self.values: dict[str, Array] = {**program.constants, **values}

    def run(self, start: int = 0, end: int | None = None) -> None:
        """Run nodes [start, end). Raises ValueError naming the node and the value that is missing or of another shape."""
        stop = len(self._program.nodes) if end is None else end
        for index in range(start, stop):
            self._node(index)

    def segment(self, name: str) -> None:
        """Run one segment. Raises KeyError for a segment that the program does not have."""
        found = {segment.name: segment for segment in self._program.segments}[name]
        self.run(found.start, found.end)

    def _node(self, index: int) -> None:
        node = self._program.nodes[index]
        arrays: dict[str, Array] = {}
        for operand in node.op.operands:
            value = node.operands[operand.name]
            if operand.role == "out":
                continue
            if value.name not in self.values:
                raise ValueError(
                    f"node {index} ({node.op.name}) needs {operand.name}: {value.kind} {value.name} has no value"
                )
            array = self.values[value.name]
            if value.kind in ("weight", "constant") and array.shape != value.shape:
                raise ValueError(
                    f"{value.kind} {value.name} has shape {list(array.shape)}, recorded as {list(value.shape)}"
                )
            arrays[operand.name] = array
        node.op.reference(arrays, node.attrs)
        for operand in node.op.operands:
            if operand.role != "in":
                self.values[node.operands[operand.name].name] = arrays[operand.name]


def interpret(program: Program, values: Mapping[str, Array]) -> dict[str, Array]:
    """Every value after all segments; see Interpreter."""
    interpreter = Interpreter(program, values)
    interpreter.run()
    return interpreter.values
