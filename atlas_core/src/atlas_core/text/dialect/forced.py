"""Lark grammars of answers that are calls and nothing else, for ``tool_choice`` required and named."""

import json
from collections.abc import Sequence

from atlas_core.contracts.dialect import Tool
from atlas_core.text.grammar import json_rule


def hermes(tools: Sequence[Tool], parallel: bool) -> str:
    """One or more tagged objects."""
    return _grammar(tools, "arguments", '"<tool_call>\\n" call "\\n</tool_call>"', r'"\n"', parallel)


def bare(tools: Sequence[Tool], parallel: bool, *, key: str) -> str:
    """One or more objects, divided by ``;`` and a blank."""
    return _grammar(tools, key, "call", '"; "', parallel)


def _grammar(tools: Sequence[Tool], key: str, tagged: str, between: str, parallel: bool) -> str:
    lines = [
        "%llguidance {}",
        f"start: tagged ({between} tagged)*" if parallel else "start: tagged",
        f"tagged: {tagged}",
    ]
    lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
        rule = json_rule(tool.parameters or {"type": "object"}, f"tools[{index}].function.parameters")
        lines.append(f'call_{index}: {json.dumps(head, ensure_ascii=False)} {rule} "}}"')
    return "\n".join(lines) + "\n"
