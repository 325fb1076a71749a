"""``atlas explain``: every choice with its reasons, before anything is loaded."""

import json
from collections.abc import Iterator
from typing import Any

import click

from atlas_core.assembly.environment import discover_plugins
from atlas_core.cli.options import SectionedCommand, settings_from, settings_options


@click.command("explain", cls=SectionedCommand)
@settings_options(
    "hardware", "numerics", "revision", "load_format", "transcode", "dtype", "block_size", "prefix_cache", "state_snapshots", "max_seq_len", "max_batch_size",
    "max_prefill_tokens", "max_mixed_tokens", "mixed_steps", "attention_cost", "chat_template", "tool_call_parser", "reasoning_parser",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(as_json: bool, **params: Any) -> None:
    """Show what would be chosen for a model, and why."""
    from atlas_core.assembly.explain import explain

    found = explain(discover_plugins(), settings_from(params))
    click.echo(json.dumps(found, indent=1) if as_json else "\n".join(text(found)))


def text(found: dict[str, Any]) -> Iterator[str]:
    """The same for a person: repeated layers once."""
    hardware = found["hardware"]
    inherits = f", extends {' → '.join(hardware['extends'])}" if hardware["extends"] else ""
    yield f"target     {found['target']}"
    yield f"hardware   {hardware['name']} from {hardware['dist']}{inherits}"
    yield from _refusals(hardware["candidates"], hardware["name"])
    yield f"arch       {hardware['arch']}"
    if hardware["build"]:
        yield f"           its kernels are not built: {hardware['build']}"
    yield from _refusals(hardware["archs"], hardware["arch"])
    yield f"kernels    {found['kernels']}"
    yield f"container  {found['container']['name']}"
    yield from _refusals(found["container"]["candidates"], found["container"]["name"])
    yield f"loader     {found['loader']['family']} from {found['loader']['dist']}, tensors named as {found['loader']['naming']}"
    yield f"format     {found['format']['name']}"
    yield from _refusals(found["format"]["candidates"], found["format"]["name"])
    if found["preset"]["candidates"]:
        yield f"preset     {found['preset']['name'] or 'none: no model of this name is known'}"
        yield from _refusals(found["preset"]["candidates"], found["preset"]["name"])
    for row in found["sampling"]:
        yield f"sampling   {row['name']} {row['value']:g}, from {row['source']}"
    for row in found["dialects"]:
        said = f"{row['name']}, from {row['source']}" if row["name"] else f"not known: {row['source']}"
        yield f"dialect    {row['reads']}: {said}"
        yield from _refusals(row["candidates"], row["name"])
    model = found["model"]
    yield f"model      {model['path']}"
    yield f"           {model['layers']} layers of {model['hidden_size']}, vocabulary {model['vocab_size']}"
    embeds = found["embeds"]
    if embeds is not None:
        yield f"embeds     texts, pooling {embeds['pooling']}{', normalised' if embeds['normalised'] else ''}"
    for warning in model["warnings"]:
        yield f"           note: {warning}"
    for row in found["layouts"]:
        changed = "" if row["stored"] == row["read_as"] else f" transcoded to {row['read_as']}"
        yield f"layout     {row['weights']} weights {row['stored']}{changed}, {row['packing']}, {row['bytes'] / 2**20:.1f} MiB"
    for group, cache in found["caches"].items():
        yield f"cache      {group}: {cache['layout']}, pages of {cache['page_tokens']} tokens"
    for group, state in found["states"].items():
        size = " × ".join(map(str, state["shape"]))
        yield f"state      {group}: {size} floats, {state['layers']} layers, {state['slots']} sequences"
    yield f"reuse      {_reuse(found)}"
    for bucket in found["buckets"]:
        yield ""
        yield (
            f"bucket     up to {bucket['tokens']} tokens, {bucket['sequences']} sequences, {bucket['max_query']} tokens each; "
            f"activations {bucket['arena_bytes'] / 2**20:.1f} MiB, scratch {bucket['scratch_bytes'] / 2**20:.1f} MiB"
        )
        if bucket["predicted_tokens_per_second"] is not None:
            yield _predicted(bucket, found["prediction"])
        for segment in bucket["segments"]:
            yield f"  {segment['name']}: {len(segment['steps'])} nodes"
            yield from _steps(segment["steps"])


def _predicted(bucket: dict[str, Any], premises: dict[str, Any]) -> str:
    return (
        f"  prediction, not measured: {bucket['predicted_tokens_per_second']:.1f} tokens/s with {premises['context']} tokens of "
        f"context: {bucket['predicted_step_bytes'] / 1e9:.2f} GB a step at {premises['share_of_bandwidth']:.0%} of "
        f"{premises['memory_bandwidth_gbps']:g} GB/s"
    )


def _steps(steps: list[dict[str, Any]]) -> Iterator[str]:
    """Each different step once, in order of first appearance, with its count."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for step in steps:
        weights = {name: o["type"] for name, o in step["operands"].items() if name in step["packings"]}
        key = json.dumps(
            [step["op"], step["implementation"], step["replaces"], weights, step["packings"], step["rejected"]]
        )
        groups.setdefault(key, []).append(step)
    for group in groups.values():
        step = group[0]
        packed = ", ".join(dict.fromkeys(step["packings"].values()))
        fused = f"  = {_repeated(step['replaces'])}" if len(step["replaces"]) > 1 else ""
        yield f"  {len(group):4} × {step['op']:24} {step['implementation']}{f' [{packed}]' if packed else ''}{fused}"
        for candidate in step["rejected"]:
            yield f"           not {candidate['name']}: {_why(candidate)}"


def _repeated(ops: list[str]) -> str:
    """The sum of what is replaced, a chain as its link and how often it comes."""
    link = next(n for n in range(1, len(ops) + 1) if ops == ops[:n] * (len(ops) // n))
    text = " + ".join(ops[:link])
    return text if link == len(ops) else f"({text}) × {len(ops) // link}"


def _why(candidate: dict[str, Any]) -> str:
    reasons = "; ".join(candidate["reasons"])
    return reasons if not candidate["ok"] else f"rank {candidate['rank']} is lower{f' ({reasons})' if reasons else ''}"


def _reuse(found: dict[str, Any]) -> str:
    """What is kept of prompts for later ones."""
    setting = next(row for row in found["settings"] if row["name"] == "prefix_cache")
    if setting["value"] != "True":
        return f"nothing is kept of prompts: {setting['source']}"
    kept = [state["snapshots"] for state in found["states"].values()]
    return "pages of prompts are kept for later ones" + (f", and {kept[0]} snapshots of states" if kept else "")


def _refusals(candidates: list[dict[str, Any]], winner: str) -> Iterator[str]:
    for candidate in candidates:
        if candidate["name"] != winner:
            yield f"           not {candidate['name']}: {_why(candidate)}"
