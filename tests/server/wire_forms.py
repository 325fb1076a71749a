"""Conversations in the internal form, and how clients of each face would send them: the inverse of what the server reads."""

import json

from hypothesis import strategies as st

TEXTS = st.text(alphabet='aé😀\n "<{\\\u2028', min_size=1, max_size=8)
PIXEL = "data:image/png;base64,iVBORw0KGgo="
IMAGES = st.sampled_from([PIXEL, "https://example.org/a.png"]).map(
    lambda url: {"type": "image_url", "image_url": {"url": url}}
)
PARTS = st.one_of(TEXTS.map(lambda text: {"type": "text", "text": text}), IMAGES)
ARGUMENTS = st.dictionaries(
    TEXTS, st.one_of(st.none(), st.integers(-9, 9), TEXTS, st.lists(TEXTS, max_size=2)), max_size=2
)


def content(draw):
    """A text, or parts that say more than one text would."""
    parts = draw(st.lists(PARTS, min_size=1, max_size=3))
    alone = len(parts) == 1 and parts[0]["type"] == "text"
    return parts[0]["text"] if alone else parts


@st.composite
def conversations(draw):
    """Turns that follow one another as they do in agents: systems in between, parallel calls with a result each, thoughts."""
    messages, calls = [], 0
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXTS)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": content(draw)})
        if draw(st.booleans()):
            messages.append({"role": "system", "content": draw(TEXTS)})
        for _ in range(draw(st.integers(0, 2))):
            wanted = draw(st.integers(1, 3))
            messages.append(answer(draw, [f"toolu_{calls + number}" for number in range(wanted)]))
            for number in range(wanted):
                result = {
                    "role": "tool",
                    "tool_call_id": f"toolu_{calls + number}",
                    "content": draw(st.just("")) or content(draw),
                }
                messages.append(result | ({"is_error": True} if draw(st.booleans()) else {}))
            calls += wanted
        messages.append(answer(draw, []))
    return [*messages, {"role": "user", "content": content(draw)}]


def answer(draw, ids):
    """A turn of the assistant with calls of ``ids``."""
    message = {"role": "assistant", "content": draw(st.one_of(st.just(""), TEXTS))}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(TEXTS)
    if ids:
        functions = [{"name": "f", "arguments": json.dumps(draw(ARGUMENTS), ensure_ascii=False)} for _ in ids]
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": function}
            for call_id, function in zip(ids, functions, strict=True)
        ]
    return message


def as_messages(conversation):
    """``system`` and ``messages`` of a request to the messages endpoint."""
    turns = list(conversation)
    body = {"system": turns.pop(0)["content"]} if turns[0]["role"] == "system" else {}
    wire = []
    for turn in turns:
        if turn["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": turn["tool_call_id"], "content": blocks(turn["content"])}
            result |= {"is_error": True} if turn.get("is_error") else {}
            if wire[-1]["role"] != "user":
                wire.append({"role": "user", "content": []})
            wire[-1]["content"].append(result)
        elif turn["role"] == "user" and wire and wire[-1]["role"] == "user":
            wire[-1]["content"] += blocks(turn["content"])
        elif turn["role"] == "assistant":
            wire.append({"role": "assistant", "content": said(turn)})
        else:
            wire.append({"role": turn["role"], "content": blocks(turn["content"])})
    return body | {"messages": wire}


def said(turn):
    """The blocks of an assistant's turn."""
    found = []
    if "reasoning_content" in turn:
        found.append({"type": "thinking", "thinking": turn["reasoning_content"], "signature": "any"})
    found += blocks(turn["content"]) if turn["content"] else []
    for call in turn.get("tool_calls", ()):
        function = call["function"]
        found.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
        )
    return found


def blocks(inner):
    """Anthropic's blocks of a text or of parts."""
    parts = [{"type": "text", "text": inner}] if isinstance(inner, str) else inner
    return [
        part if part["type"] == "text" else {"type": "image", "source": source(part["image_url"]["url"])}
        for part in parts
    ]


def source(url):
    """Anthropic's source of an image."""
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    media, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "base64", "media_type": media, "data": data}
