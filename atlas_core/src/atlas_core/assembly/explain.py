"""Everything that would be chosen for a model on a machine, as values that JSON can hold. Needs neither weights nor device."""

from collections.abc import Iterable
from typing import Any

from atlas_core.assembly.machine import Machine, choose_machine
from atlas_core.assembly.model import Model, open_model
from atlas_core.assembly.plan import PlannedBucket, StepPlan, make_plan
from atlas_core.assembly.prediction import CONTEXT, SHARE, predict
from atlas_core.assembly.served import explained_speech
from atlas_core.kernels.library import build_command
from atlas_core.model.planner import Step
from atlas_core.plugins.registry import Registry
from atlas_core.server.translate import sampling_sources
from atlas_core.settings import Settings
from atlas_core.vocab.errors import CheckpointError, UsageError
from atlas_core.vocab.resolve import Candidate


def explain(registry: Registry, settings: Settings) -> dict[str, Any]:
    """The choices for ``settings.model``. Raises what the choices themselves raise."""
    if not settings.model:
        raise UsageError("no model is named", "explain describes one model", "atlas explain MODEL; try smollm2")
    machine = choose_machine(registry, settings.hardware)
    model = open_model(registry, settings, lambda done, total, note: None)
    try:
        return describe(registry, model, machine, make_plan(model, machine, settings))
    finally:
        model.checkpoint.close()


def describe(registry: Registry, model: Model, machine: Machine, plan: StepPlan) -> dict[str, Any]:
    """A finished plan in words."""
    spec = model.spec
    bandwidth = machine.chain[0].memory_bandwidth_gbps
    return {
        "hardware": {
            "name": machine.name,
            "arch": machine.arch,
            "dist": machine.dist,
            "extends": [hardware.name for hardware in machine.chain[1:]],
            "candidates": _candidates(machine.candidates),
            "archs": _candidates(machine.archs),
            "build": None if _built(machine) else build_command(machine.name, machine.arch),
        },
        "target": f"{machine.name}/{model.family}/{model.format_name} ({machine.arch})",
        "kernels": machine.tree.layer(machine.name, model.family, model.format_name),
        "container": {"name": model.container, "candidates": _candidates(model.containers)},
        "loader": {"family": model.family, "dist": model.dist, "naming": model.checkpoint.naming},
        "format": {"name": model.format_name, "candidates": _candidates(model.formats)},
        "preset": {"name": model.preset.name, "candidates": _candidates(model.preset.candidates)},
        "sampling": [
            {"name": name, "value": value, "source": source}
            for name, value, source in sampling_sources(
                model.checkpoint.generation_config, model.preset.winner, plan.settings
            )
        ],
        "dialects": _dialects(plan.settings, model, registry),
        "embeds": None
        if model.pooling is None
        else {"pooling": model.pooling.kind, "normalised": model.pooling.normalised, "prompt": model.pooling.prompt},
        "model": {
            "path": str(model.path),
            "layers": spec.layers,
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size,
            "max_position": spec.max_position,
            "warnings": list(model.store.warnings),
        },
        "layouts": _layouts(model, plan),
        "caches": {
            group: {"layout": kv.name, "dtype": kv.dtype.value, "page_tokens": kv.page_tokens}
            for group, kv in plan.choices.caches.items()
        },
        "states": {
            cache.group: {
                "layers": cache.layers,
                "slots": plan.layout.slots.slots,
                "snapshots": plan.layout.snapshots,
                "shape": list(cache.state_shape),
            }
            for cache in spec.caches
            if not cache.paged
        },
        "settings": [{"name": n, "value": v, "source": s} for n, v, s in plan.settings.rows()],
        "plugins": [_plugin(dist, version) for dist, version in registry.identity()],
        "buckets": [_bucket(planned, bandwidth) for planned in plan.buckets],
        "prediction": None if bandwidth is None else _premises(bandwidth),
    }


def _dialects(settings: Settings, model: Model, registry: Registry) -> list[dict[str, Any]]:
    """Of calls and of thoughts; without names where the checkpoint has no tokenizer yet, whose template would be asked."""
    try:
        speech = explained_speech(settings, model, registry)
    except CheckpointError as error:
        return [
            {"reads": reads, "name": None, "source": error.what, "candidates": []} for reads in ("calls", "thoughts")
        ]
    return [
        {"reads": reads, "name": choice.name, "source": choice.source, "candidates": _candidates(choice.candidates)}
        for reads, choice in zip(("calls", "thoughts"), speech.choices, strict=True)
    ]


def _built(machine: Machine) -> bool:
    """Whether there are binaries for the architecture that was chosen; it is planned for without them too."""
    return any(candidate.name == machine.arch and candidate.verdict.ok for candidate in machine.archs)


def _plugin(dist: str, identity: str) -> dict[str, str]:
    version, _, digest = identity.partition(" ")
    return {"dist": dist, "version": version, "digest": digest}


def _layouts(model: Model, plan: StepPlan) -> list[dict[str, Any]]:
    """For each storage layout: how many weights, and the bytes that all their packed copies take."""
    rows: dict[tuple[str, str, str], list[int]] = {}
    counted: set[tuple[str, str]] = set()
    for (weight, _), packed in plan.choices.packings.items():
        stored = model.store.layout(weight).name
        row = rows.setdefault((stored, plan.weights[weight].name, packed.name), [0, 0])
        copy = (model.store.alias(weight), packed.name)
        if copy not in counted:
            counted.add(copy)
            row[0] += 1
            row[1] += packed.nbytes
    return [
        {"stored": stored, "read_as": read_as, "packing": packing, "weights": count, "bytes": nbytes}
        for (stored, read_as, packing), (count, nbytes) in rows.items()
    ]


def _premises(bandwidth: float) -> dict[str, Any]:
    """What the predicted speeds rest on; none of it is measured here."""
    return {"context": CONTEXT, "share_of_bandwidth": SHARE, "memory_bandwidth_gbps": bandwidth}


def _bucket(planned: PlannedBucket, bandwidth: float | None) -> dict[str, Any]:
    bucket = planned.bucket
    prediction = predict(planned, bandwidth)
    return {
        "tokens": bucket.tokens,
        "sequences": bucket.sequences,
        "rows": bucket.rows,
        "max_query": bucket.max_query,
        "arena_bytes": planned.arena.nbytes,
        "scratch_bytes": planned.arena.scratch,
        "predicted_step_bytes": prediction and prediction.step_bytes,
        "predicted_tokens_per_second": prediction and prediction.tokens_per_second,
        "segments": [{"name": s.name, "steps": [_step(step) for step in s.steps]} for s in planned.segments],
    }


def _step(step: Step) -> dict[str, Any]:
    return {
        "op": step.node.op.name,
        "implementation": step.implementation.name,
        "replaces": list(step.replaces),
        "operands": {
            name: {"value": step.node.operands[name].name, "shape": list(spec.shape), "type": _type(spec)}
            for name, spec in step.need.operands.items()
        },
        "packings": {name: packed.name for name, packed in step.packings.items()},
        "rejected": _candidates(step.rejected),
    }


def _type(spec: Any) -> str:
    return str(spec.layout.name if spec.layout else spec.dtype.value)


def _candidates(candidates: Iterable[Candidate]) -> list[dict[str, Any]]:
    return [
        {"name": c.name, "ok": c.verdict.ok, "rank": c.verdict.rank, "reasons": list(c.verdict.reasons)}
        for c in candidates
    ]
