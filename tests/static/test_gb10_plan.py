"""What would be launched on a GB10 for two models, held against what the machine can do."""

import json

import pytest
from msgspec.structs import replace

from atlas_core.assembly.explain import explain
from atlas_core.assembly.machine import choose_machine
from atlas_core.assembly.model import open_model
from atlas_core.assembly.plan import make_plan
from atlas_core.assembly.prediction import CONTEXT, Prediction, predict
from atlas_core.cli.explain import text
from atlas_core.contracts.backend import DeviceFacts
from atlas_core.contracts.ops import BindContext, Buffer
from atlas_core.plugins import discover
from atlas_core.runtime.null import NullBackend, NullLaunch
from atlas_core.settings import read_settings
from atlas_core.vocab.kernel import LaunchAttrs
from atlas_nvidia.launch import Limits, check_arguments, check_geometry

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 500000.0, "tie_word_embeddings": False,
    "bos_token_id": 128000, "eos_token_id": 128001, "torch_dtype": "bfloat16",
}  # fmt: skip
SMOLLM = LLAMA | {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000.0,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GB10 = Limits(1024, (1024, 1024, 64), (2**31 - 1, 65535, 65535), 99 * 1024, 8)
"""Compute capability 12.x in the CUDA programming guide; clusters of 8 are portable."""
REGISTERS, WARP_REGISTERS = 65536, 256
LAYER = ["norm_qkv_rope_append", "paged_attention", "linear_add", "norm_gate_up_silu", "linear_add"]


class Checking(NullBackend):
    """Refuses what a GB10 would refuse, against declarations instead of binaries; keeps the rest."""

    def __init__(self, params) -> None:
        super().__init__()
        self.params = params
        self.prepared: list[NullLaunch] = []

    def facts(self) -> DeviceFacts:
        return replace(super().facts(), processors=48)

    def prepare_launch(self, kernel, geometry, args, attrs=None) -> NullLaunch:
        check_arguments(str(kernel), self.params[kernel], args)
        check_geometry(str(kernel), geometry, attrs or LaunchAttrs(), GB10, GB10.threads, 0)
        launch = NullLaunch(*kernel, geometry, tuple(args), attrs or LaunchAttrs())
        self.prepared.append(launch)
        return launch


@pytest.fixture(scope="module", params=[LLAMA, SMOLLM], ids=["llama-3.1-8b", "smollm2-135m"])
def planned(request, tmp_path_factory):
    """(machine, plan) for up to 64 sequences. No weights, no device, no compiler."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(request.param))
    flags = {"model": str(folder), "hardware": "gb10", "load_format": "dummy", "max_batch_size": "64"}
    settings, registry = read_settings(flags, {}), discover()
    machine = choose_machine(registry, "gb10", "sm_121a")
    model = open_model(registry, settings, lambda done, total, note: None)
    try:
        return machine, make_plan(model, machine, settings)
    finally:
        model.checkpoint.close()


@pytest.fixture(scope="module")
def launches(planned):
    """Every launch of every bucket, with made-up addresses."""
    machine, plan = planned
    backend = Checking(
        {(unit.module, entry.name): entry.params for unit in machine.tree.units("gb10") for entry in unit.entries}
    )
    for bucket in plan.buckets:
        for segment in bucket.segments:
            for step in segment.steps:
                operands = {name: Buffer(1 << 20, 1 << 40) for name in step.need.operands}
                context = BindContext(backend, operands, 1 << 12, Buffer(1 << 13, 1 << 20), 48)
                made = step.implementation.bind(step.need, context)
                assert made
                assert {(launch.module, launch.entry) for launch in made} <= set(step.implementation.kernels)
    return backend.prepared


def test_every_launch_fits_a_gb10(launches):
    """Binding them has refused what does not; this says how close the largest comes."""
    assert len(launches) > 100
    assert max(launch.geometry.shared for launch in launches) <= GB10.shared
    assert max(launch.geometry.shared for launch in launches) > 48 * 1024, "no ring is as large as it could be"


def test_a_layer_of_few_tokens_is_five_nodes(planned):
    _, plan = planned
    width = plan.program.nodes[1].operands["y"].shape[-1]
    few = [b for b in plan.buckets if b.bucket.max_query == 1 and b.bucket.tokens <= (4 if width == 4096 else 8)]
    assert few
    for bucket in few:
        ops = [step.need.op for step in bucket.segments[0].steps]
        layers = ops.count("norm_qkv_rope_append")
        assert layers >= 30
        assert ops[2 : 2 + 5 * layers] == LAYER * layers


def test_settings_come_from_the_machine(planned):
    _, plan = planned
    settings = {name: (value, source) for name, value, source in plan.settings.rows()}
    for name, value in (("dtype", "bf16"), ("numerics", "fast"), ("block_size", "64"), ("max_prefill_tokens", "2048")):
        assert settings[name][0] == value
        assert "gb10/HARDWARE.toml" in settings[name][1]


@pytest.mark.parametrize("sequences", [1, 64])
def test_speed_is_predicted_from_the_bytes_of_a_step(request, planned, sequences):
    machine, plan = planned
    config = request.node.callspec.params["planned"]
    bucket = next(b for b in plan.buckets if b.bucket.tokens == sequences and b.bucket.max_query == 1)
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    keys = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner + 2 * hidden
    # The head and the last norm are read whole; of the embedding, a row for each token.
    weights = layers * layer + config["vocab_size"] * hidden + hidden + sequences * hidden
    nbytes = 2 * (weights + sequences * CONTEXT * layers * 2 * keys)
    found = predict(bucket, machine.chain[0].memory_bandwidth_gbps)
    assert found == Prediction(nbytes, pytest.approx(sequences * 0.88 * 273e9 / nbytes))


def test_nothing_is_predicted_for_prompts_or_without_a_bandwidth(planned):
    _, plan = planned
    prompts = [bucket for bucket in plan.buckets if bucket.bucket.max_query > 1]
    assert prompts
    assert [predict(bucket, 273) for bucket in prompts] == [None] * len(prompts)
    assert predict(plan.buckets[0], None) is None


def test_explain_says_that_it_is_a_prediction(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM))
    flags = {"model": str(tmp_path), "hardware": "gb10", "load_format": "dummy", "max_batch_size": "1"}
    found = explain(discover(), read_settings(flags, {}))
    assert found["prediction"] == {"context": CONTEXT, "share_of_bandwidth": 0.88, "memory_bandwidth_gbps": 273}
    decode = found["buckets"][0]
    assert [row["name"] for row in found["dialects"]] == [None, None], (
        "there is no tokenizer whose template could be asked"
    )
    assert sum(line.startswith("dialect    ") and "not known" in line for line in text(found)) == 2
    lines = [line for line in text(found) if "tokens/s" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"  prediction, not measured: {decode['predicted_tokens_per_second']:.1f} tokens/s")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_launches_fit_with_what_the_compiler_added(builds, launches):
    """Static shared memory beside the dynamic, and registers for all threads of a block."""
    records = builds.records("gb10", "sm_121a")
    for module, entry, geometry in {(launch.module, launch.entry, launch.geometry) for launch in launches}:
        found = records[module].entries[entry]
        assert geometry.shared + found.shared <= GB10.shared, (module, geometry)
        # Registers are given to warps in units of 256 (CUDA programming guide, compute capability 12.x).
        warps = -(-geometry.block[0] * geometry.block[1] * geometry.block[2] // 32)
        each = -(-found.registers * 32 // WARP_REGISTERS) * WARP_REGISTERS
        assert warps * each <= REGISTERS, (module, entry, geometry)
