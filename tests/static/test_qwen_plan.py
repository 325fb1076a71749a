"""What would be launched for models of the Qwen family: few nodes a layer, each within what the machine can do."""

import json

import pytest

from atlas_core.assembly.machine import choose_machine
from atlas_core.assembly.model import open_model
from atlas_core.assembly.plan import make_plan
from atlas_core.contracts.backend import DeviceFacts
from atlas_core.contracts.ops import BindContext, Buffer
from atlas_core.plugins import discover
from atlas_core.runtime.null import NullBackend, NullLaunch
from atlas_core.settings import read_settings
from atlas_core.vocab.kernel import LaunchAttrs
from atlas_nvidia.launch import Limits, check_arguments, check_geometry

COMMON = {
    "num_attention_heads": 32, "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 40960,
    "rope_theta": 1000000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 151936, "head_dim": 128,
    "eos_token_id": 151645,
}  # fmt: skip
DENSE = COMMON | {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_key_value_heads": 8,
}  # fmt: skip
BIASED = COMMON | {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "num_attention_heads": 28,
}  # fmt: skip
MIXTURE = COMMON | {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
HYBRID = COMMON | {
    "model_type": "qwen3_5_moe", "hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "mlp_only_layers": [], "full_attention_interval": 4, "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
MODELS = {"qwen3-8b": DENSE, "qwen2-7b": BIASED, "qwen3-30b-a3b": MIXTURE, "qwen3.5-35b-a3b": HYBRID}
MACHINES = {
    "hopper": ("sm_90a", 132, Limits(1024, (1024, 1024, 64), (2**31 - 1, 65535, 65535), 227 * 1024, 8)),
    "gb10": ("sm_121a", 48, Limits(1024, (1024, 1024, 64), (2**31 - 1, 65535, 65535), 99 * 1024, 8)),
}
"""Architecture, processors, and limits of a launch (CUDA programming guide, compute capabilities 9.0 and 12.x)."""
_EXPERTS = ["norm_route", "moe_shared_add"]
_LINEAR = ["norm_linears", "linear_attention_step", "linear_add", *_EXPERTS]
_ATTENTION = ["heads_rope_append", "paged_attention"]
_GATED = ["norm_linears", "heads_rope_append", "paged_attention", "sigmoid_mul", "linear_add", *_EXPERTS]
LAYERS = {
    "qwen3-8b": [["norm_qkv_heads_rope_append", "paged_attention", "linear_add", "norm_gate_up_silu", "linear_add"]],
    "qwen2-7b": [["norm_qkv_bias_rope_append", "paged_attention", "linear_add", "norm_gate_up_silu", "linear_add"]],
    "qwen3-30b-a3b": [["norm_qkv_heads_rope_append", "paged_attention", "linear_add", "norm_route", "moe_experts_add"]],
    "qwen3.5-35b-a3b": [_LINEAR, _LINEAR, _LINEAR, _GATED],
}
"""The nodes of each layer, as long as layers differ."""
CHAINED = {
    ("qwen3.5-35b-a3b", "hopper"): ["hybrid_layers", *_ATTENTION, "mixture_layers", *_ATTENTION, "output_mixture"]
}
"""Of all layers, for one token, where several are a launch."""
LAUNCHES = {"qwen3-8b": 6, "qwen2-7b": 5, "qwen3-30b-a3b": 7, "qwen3.5-35b-a3b": 6}
"""Of the first layer."""
STATIC = 4736
"""Bytes of shared memory that a kernel declares itself at most; test_gpu_kernels.py knows the real ones."""


class Checking(NullBackend):
    """Refuses what the machine would refuse, against declarations instead of binaries."""

    def __init__(self, params, processors, limits) -> None:
        super().__init__()
        self.params, self.processors, self.limits = params, processors, limits

    def facts(self) -> DeviceFacts:
        facts = super().facts()
        return DeviceFacts(**{name: getattr(facts, name) for name in facts.__slots__} | {"processors": self.processors})

    def prepare_launch(self, kernel, geometry, args, attrs=None) -> NullLaunch:
        check_arguments(str(kernel), self.params[kernel], args)
        check_geometry(str(kernel), geometry, attrs or LaunchAttrs(), self.limits, 1024, 0)
        return NullLaunch(*kernel, geometry, tuple(args), attrs or LaunchAttrs())


@pytest.fixture(
    scope="module",
    params=[(model, hardware) for model in MODELS for hardware in MACHINES],
    ids="-".join,
)
def planned(request, tmp_path_factory):
    """(model, hardware, plan, backend) for up to 64 sequences. No weights, no device, no compiler."""
    model, hardware = request.param
    return model, hardware, *plan_of(MODELS[model], hardware, tmp_path_factory.mktemp("model"))


def plan_of(config, hardware, folder, processors=None):
    """The plan, of a device with other ``processors`` than its kind has if so asked, and a backend for it."""
    (folder / "config.json").write_text(json.dumps(config))
    flags = {"model": str(folder), "hardware": hardware, "load_format": "dummy", "max_batch_size": "64"}
    settings, registry = read_settings(flags, {}), discover()
    arch, usual, limits = MACHINES[hardware]
    machine = choose_machine(registry, hardware, arch)
    assert machine.processors == usual
    opened = open_model(registry, settings, lambda done, total, note: None)
    params = {
        (unit.module, entry.name): entry.params for unit in machine.tree.units(hardware) for entry in unit.entries
    }
    try:
        plan = make_plan(opened, machine, settings, processors)
    finally:
        opened.checkpoint.close()
    return plan, Checking(params, processors or usual, limits)


def bound(step, backend):
    # Of a cache each layer's part must begin at a multiple of 16.
    operands = {
        name: Buffer(1 << 20, spec.shape[0] << 30 if name == "cache" else 1 << 40)
        for name, spec in step.need.operands.items()
    }
    context = BindContext(
        backend, operands, 1 << 12, Buffer(1 << 13, 1 << 30), backend.processors, lambda data: 1 << 14
    )
    return step.implementation.bind(step.need, context)


def test_every_launch_is_declared_and_fits_the_machine(planned):
    _, _, plan, backend = planned
    for bucket in plan.buckets:
        for segment in bucket.segments:
            for step in segment.steps:
                made = bound(step, backend)
                # Of the kernels that an implementation names, the shapes of a node may need fewer.
                assert made
                assert {(launch.module, launch.entry) for launch in made} <= set(step.implementation.kernels)


def test_a_decoded_layer_is_few_nodes_and_launches(planned):
    model, hardware, plan, backend = planned
    # Rows of 4096 leave room for fewer normalised tokens where a block has 99 KB.
    few = 8 if hardware == "hopper" or MODELS[model]["hidden_size"] < 3000 else 2
    checked = 0
    for bucket in plan.buckets:
        if bucket.bucket.max_query > 1 or bucket.bucket.tokens > few:
            continue
        steps = bucket.segments[0].steps
        layers = MODELS[model]["num_hidden_layers"]
        if (model, hardware, bucket.bucket.tokens) == ("qwen3-30b-a3b", "hopper", 1):
            assert [step.need.op for step in steps[1:4]] == ["embed", "moe_decoder_layers", "gather_rows"]
            assert len(steps[2].replaces) == 17 * layers
            continue
        period = LAYERS[model]
        nodes = [node for layer in range(layers) for node in period[layer % len(period)]]
        chained = CHAINED.get((model, hardware)) if bucket.bucket.tokens == 1 else None
        assert [step.need.op for step in steps[2 : 2 + len(chained or nodes)]] == (chained or nodes)
        assert chained or sum(len(bound(step, backend)) for step in steps[2:7]) == LAUNCHES[model]
        checked += 1
    assert checked >= 2


def test_experts_are_streamed_for_few_tokens_and_sorted_for_many(planned):
    model, _, plan, _ = planned
    seen = []
    for bucket in plan.buckets:
        names = {step.implementation.name for step in bucket.segments[0].steps if step.need.op == "moe_experts_add"}
        assert len(names) <= 1
        seen += [(bucket.bucket.tokens, "streamed" in name) for name in names]
    assert [streamed for _, streamed in seen] == [tokens <= 64 for tokens, _ in seen]
    # Of one token all layers may be one launch; other models have no such op.
    assert {streamed for _, streamed in seen} == ({True, False} if model == "qwen3-30b-a3b" else set())
    assert model != "qwen3-30b-a3b" or len(plan.buckets) - 1 <= len(seen)


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3.5-35b-a3b"])
def test_a_device_with_fewer_processors_gets_a_launch_for_each_part(model, tmp_path):
    plan, backend = plan_of(MODELS[model], "hopper", tmp_path, processors=114)
    (steps,) = (
        bucket.segments[0].steps for bucket in plan.buckets if bucket.bucket.tokens == bucket.bucket.max_query == 1
    )
    layers, period = MODELS[model]["num_hidden_layers"], LAYERS[model]
    nodes = [node for layer in range(layers) for node in period[layer % len(period)]]
    assert [step.need.op for step in steps[2 : 2 + len(nodes)]] == nodes
    for step in steps:
        assert bound(step, backend)
