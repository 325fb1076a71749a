"""Good requests to every endpoint that reads a body: what the fuzzer begins with."""

from typing import Any

_SCHEMA = {
    "type": "object",
    "properties": {"minutes": {"type": "integer"}, "label": {"type": "string"}},
    "required": ["minutes"],
}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "set_timer", "arguments": '{"minutes": 5}'}}
_CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "a timer"}, {"type": "text", "text": "please"}]},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    {"role": "user", "content": "thanks"},
]
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "set_timer", "description": "sets", "parameters": _SCHEMA, "strict": True},
    }
]
_FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA, "strict": True}}
_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "a timer", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "I will"},
        {"type": "tool_use", "id": "t1", "name": "set_timer", "input": {"minutes": 5}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "ok"}], "is_error": False},
        {"type": "text", "text": "thanks"},
    ]},
]  # fmt: skip
_ITEMS = [
    {"role": "developer", "content": "Be short."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c1", "name": "set_timer", "arguments": '{"minutes":5}'},
    {"type": "function_call_output", "call_id": "c1", "output": "ok"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done.", "annotations": []}]},
    {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "y"}]},
    {"role": "user", "content": "and?"},
]
_FLAT = [
    {"type": "function", "name": "set_timer", "parameters": _SCHEMA, "strict": True}, {"type": "custom", "name": "patch"},
    {"type": "web_search"},
    {"type": "namespace", "name": "files", "description": "d", "tools": [{"type": "function", "name": "read", "parameters": _SCHEMA}]},
]  # fmt: skip
_DOCUMENT = {"type": "document", "title": "t", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}

SEEDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": _CHAT, "model": "tiny", "max_tokens": 50}),
    ("/v1/chat/completions", {
        "messages": _CHAT, "tools": _TOOLS, "tool_choice": "auto", "parallel_tool_calls": False, "stream": True,
        "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2, "n": 2, "seed": 1,
    }),
    ("/v1/chat/completions", {
        "messages": _CHAT[:2], "response_format": _FORM, "reasoning_effort": "low", "stop": ["x", "yy"], "temperature": 0.5,
        "logit_bias": {"97": 1.0}, "chat_template_kwargs": {"enable_thinking": False}, "thinking_token_budget": 5,
    }),
    ("/v1/chat/completions", {
        "messages": _CHAT[:2], "reasoning": {"effort": "high", "max_tokens": 9}, "thinking": {"type": "enabled", "budget_tokens": 5},
        "enable_thinking": True, "thinking_budget": 7, "max_thinking_tokens": 8, "json_schema": _SCHEMA,
    }),
    ("/v1/chat/completions", {"messages": _CHAT[:2], "structured_outputs": {"regex": "[a-z]+"}, "stream": True}),
    ("/v1/chat/completions", {
        "messages": _CHAT[:2], "tools": _TOOLS, "stream": True,
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "set_timer"}}]}},
    }),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 9, "echo": True, "stop": "x", "seed": -1}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "logprobs": 2, "stream": True, "min_tokens": 2, "top_k": 3, "min_p": 0.1}),
    ("/v1/messages", {
        "model": "tiny", "max_tokens": 40, "messages": _BLOCKS, "system": [{"type": "text", "text": "Be short."}], "stream": True,
        "tools": [{"name": "set_timer", "description": "sets", "input_schema": _SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "stop_sequences": ["five"], "metadata": {"user_id": "u"},
    }),
    ("/v1/completions", {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}),
    ("/v1/messages", {
        "model": "tiny", "max_tokens": 20, "messages": [{"role": "user", "content": [_DOCUMENT, {"type": "text", "text": "sum up"}]}],
        "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
    }),
    ("/v1/messages", {
        "model": "tiny", "max_tokens": 2000, "messages": _BLOCKS[:1], "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}},
    }),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": _BLOCKS, "system": "Be short."}),
    ("/v1/responses", {"model": "tiny", "input": _ITEMS, "tools": _FLAT, "stream": True, "include": ["reasoning.encrypted_content"]}),
    ("/v1/responses", {
        "input": "go", "instructions": "Be short.", "text": {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}},
        "reasoning": {"effort": "low", "summary": "auto"}, "max_output_tokens": 20, "metadata": {"a": "b"}, "store": True,
    }),
    ("/v1/responses", {"input": _ITEMS[:2], "background": True, "stream": True, "tool_choice": "required", "tools": _FLAT}),
    ("/v1/responses/input_tokens", {"input": _ITEMS, "tools": _FLAT}),
    ("/v1/conversations", {"items": _ITEMS[:2], "metadata": {"a": "b"}}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
    ("/invocations", {"messages": _CHAT[:2], "max_tokens": 9, "stream": True}),
    ("/invocations", {"prompt": "a", "max_tokens": 9, "regex": "[a-z]+"}),
    ("/tokenize", {"messages": _CHAT, "tools": _TOOLS, "return_token_strs": True, "with_pieces": True}),
    ("/tokenize", {"prompt": "a<eos>b", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [1, 2, 259]}),
    ("/apply-template", {"messages": _CHAT, "tools": _TOOLS, "continue_final_message": False}),
)  # fmt: skip
