"""What is true of every NVIDIA kernel before any GPU has seen it.

The first run compiles everything, which takes a minute or two; later runs compile what has changed.
"""

from pathlib import Path

import pytest
from cubin_file import Cubin

from atlas_core.kernels.closure import closure
from atlas_core.vocab.errors import KernelError

PROBES = Path(__file__).parent / "probes"
TARGETS = [("hopper", "sm_90a"), ("gb10", "sm_121a"), ("gb10", "sm_120f"), ("gb10", "sm_90a")]
"""The tree of gb10 is built for Hopper as well: there its kernels can be run."""
SM_12X = [("gb10", "sm_121a"), ("gb10", "sm_120f")]
SHARED = {"sm_90a": 227 * 1024, "sm_121a": 99 * 1024, "sm_120f": 99 * 1024}
"""Bytes of shared memory that a block may have (CUDA programming guide, compute capabilities)."""
REGISTERS = 65536
"""Of a multiprocessor (the same)."""

TENSOR = ("HMMA", "HGMMA", "QMMA", "OMMA", "IMMA")
"""How opcodes of the tensor cores begin."""
LOCAL = {"STL", "LDL"}
"""Stores to and loads from a thread's own memory."""
COPIES, PRODUCTS, MATRICES = "LDGSTS", "HMMA.16816.F32", "LDSM"
WIDE_PRODUCTS = "HGMMA.64x128x16.F32"
ANY_WIDE, BOXES, BULK = "HGMMA", "UTMALDG", "UBLKCP"
ELSEWHERE = "STAS"
"""st.async: stores to the shared memory of another block."""
ALONE = "ACQBULK"
"""griddepcontrol.wait: what a kernel says that may begin before its predecessor has ended."""
EARLY = "PREEXIT"
"""griddepcontrol.launch_dependents."""
EXPECTED = {
    "linear_gemv": {COPIES, PRODUCTS, EARLY},
    "norm_qkv": {COPIES, PRODUCTS, EARLY},
    "norm_gate_up": {COPIES, PRODUCTS, EARLY},
    "norm_linears": {COPIES, PRODUCTS, EARLY},
    "delta_prepare": {COPIES, PRODUCTS, MATRICES},
    "delta_states": {COPIES, PRODUCTS, MATRICES},
    "linear_gemm": {COPIES, PRODUCTS, MATRICES},
    "atlas_plugin_hopper:linear_gemm": {COPIES, WIDE_PRODUCTS},
    "scaled_linear": {COPIES, PRODUCTS, MATRICES, EARLY},
    "scaled_linears": {COPIES, PRODUCTS, MATRICES, EARLY},
    "scaled_gate_up": {COPIES, PRODUCTS, MATRICES, EARLY},
    "scaled_qkv": {COPIES, PRODUCTS, MATRICES, EARLY},
    "scaled_gemm": {COPIES, PRODUCTS, MATRICES},
    "atlas_plugin_hopper:scaled_tma": {BOXES, BULK, ANY_WIDE, EARLY},
    "norm_route": {COPIES, PRODUCTS, EARLY},
    "moe_gate_up": {COPIES, PRODUCTS, EARLY},
    "moe_down": {COPIES, PRODUCTS, EARLY},
    "moe_gemm": {COPIES, PRODUCTS, MATRICES},
    "moe_coded_gate_up": {COPIES, PRODUCTS, EARLY},
    "moe_coded_down": {COPIES, PRODUCTS, EARLY},
    "moe_coded_gemm": {COPIES, PRODUCTS, MATRICES},
    "atlas_plugin_hopper:moe_gemm": {COPIES, WIDE_PRODUCTS},
    "atlas_plugin_hopper:paged_prefill_wgmma": {COPIES, ANY_WIDE, PRODUCTS},
    "atlas_plugin_hopper:linear_tma": {BOXES, ANY_WIDE},
    "atlas_plugin_hopper:gate_up_tma": {BOXES, ANY_WIDE},
    "atlas_plugin_hopper:qkv_tma": {BOXES, ANY_WIDE},
    "atlas_plugin_hopper:qkv_staged": {BOXES, ANY_WIDE},
    "atlas_plugin_hopper:qkv_pairs": {BOXES, ANY_WIDE},
    "atlas_plugin_hopper:moe_tma": {BOXES, ANY_WIDE},
    "atlas_plugin_hopper:skinny_linear": {BOXES, ANY_WIDE, EARLY},
    "atlas_plugin_hopper:skinny_linears": {BOXES, ANY_WIDE, EARLY},
    "atlas_plugin_hopper:skinny_gate_up": {BOXES, ANY_WIDE, EARLY},
    "atlas_plugin_hopper:skinny_qkv": {BOXES, ANY_WIDE, EARLY},
    "atlas_plugin_hopper:hybrid_layers": {COPIES, BULK, PRODUCTS, MATRICES, EARLY},
    "atlas_plugin_hopper:decoder_layers": {COPIES, BULK, PRODUCTS, MATRICES},
    "atlas_plugin_hopper:moe_decoder_layers": {COPIES, BULK, PRODUCTS, MATRICES},
    "atlas_plugin_hopper:decoder_clusters": {COPIES, BULK, PRODUCTS, MATRICES, ELSEWHERE, EARLY},
    "atlas_plugin_hopper:narrow_head": {BULK, PRODUCTS, EARLY},
    "paged_decode": {COPIES, PRODUCTS, MATRICES},
    "paged_prefill": {COPIES, PRODUCTS, MATRICES},
}
"""Opcodes that the speed of a source rests on, by its stem, with the package where only Hopper has it so: weights and keys come by asynchronous copies, products are the
tensor cores'."""
E2M1 = {"e2m1_encode": "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C", "e2m1_decode": "F2FP.F16.E2M1.UNPACK_B"}

targets = pytest.mark.parametrize(("hardware", "arch"), TARGETS)
on_sm_12x = pytest.mark.parametrize(("hardware", "arch"), SM_12X)
slow = [pytest.mark.slow, pytest.mark.timeout(900)]
pytestmark = slow


@targets
def test_every_module_compiles_without_a_warning_and_spills_nothing(builds, hardware, arch):
    records = builds.records(hardware, arch)
    units = {unit.module: unit for unit in builds.tree.units(hardware)}
    assert set(records) == set(units)
    assert [name for name, unit in units.items() if unit.max_spill_bytes] == []
    spills = {(name, e): v.spills for name, record in records.items() for e, v in record.entries.items()}
    assert spills == dict.fromkeys(spills, 0)


def test_the_gate_sees_a_warning(builds, tmp_path):
    source = tmp_path / "careless.cu"
    source.write_text('extern "C" __global__ void k(int* x) { int forgotten = 0; *x = 1; }')
    with pytest.raises(KernelError, match="with warnings") as caught:
        builds.compile_alone(source, "sm_121a", tmp_path / "careless.cubin")
    assert "forgotten" in caught.value.why


@targets
def test_static_shared_memory_and_registers_fit_a_block(builds, hardware, arch):
    for name, record in builds.records(hardware, arch).items():
        for entry, found in record.entries.items():
            assert found.shared is not None, (name, entry)
            assert found.shared <= SHARED[arch], (name, entry)
            assert found.registers is not None, (name, entry)
            assert found.registers <= 255, (name, entry)


@targets
def test_every_binary_is_of_its_architecture(builds, hardware, arch):
    found = {name: builds.cubin(hardware, arch, name).sm for name in builds.records(hardware, arch)}
    assert found == dict.fromkeys(found, int(arch[3:-1]))


@targets
def test_no_kernel_calls_a_function_of_the_driver(builds, hardware, arch):
    foreign = {name: builds.cubin(hardware, arch, name).foreign for name in builds.records(hardware, arch)}
    assert foreign
    assert {name: found for name, found in foreign.items() if found} == {}


def test_the_gate_sees_a_call_of_the_driver(builds, tmp_path):
    """On sm_12x only, a bulk copy to .shared::cluster becomes a call."""

    def foreign(name: str, arch: str) -> list[str]:
        return Cubin(builds.compile_alone(PROBES / name, arch, tmp_path / f"{arch}.cubin").read_bytes()).foreign

    assert foreign("bulk_to_cluster.cu", "sm_121a") == ["__cuda_syscall_cp_async_bulk_unicast"]
    assert foreign("bulk_to_cluster.cu", "sm_90a") == []
    assert foreign("bulk_to_cta.cu", "sm_121a") == []


@targets
def test_no_thread_keeps_an_array_in_local_memory(builds, hardware, arch):
    for name, functions in builds.opcodes(hardware, arch).items():
        for function, opcodes in functions.items():
            assert LOCAL.isdisjoint(opcode.partition(".")[0] for opcode in opcodes), (name, function)


def test_the_gate_sees_an_array_in_local_memory(builds, tmp_path):
    """Registers have no addresses, so an array that is indexed at run time has no place in them."""
    source = tmp_path / "indexed.cu"
    source.write_text(
        'extern "C" __global__ void k(int* x) { int a[64]; for (int i = 0; i < 64; ++i) a[x[i] & 63] = x[64 + i]; '
        "*x = a[x[128] & 63]; }"
    )
    cubin = builds.compile_alone(source, "sm_121a", tmp_path / "indexed.cubin")
    functions = builds.opcodes_alone(cubin, "sm_121a")
    assert {opcode.partition(".")[0] for opcode in functions["k"]} >= LOCAL


@targets
def test_sources_become_the_instructions_that_they_rest_on(builds, hardware, arch):
    checked = set()
    for unit in builds.tree.units(hardware):
        package, _, path = unit.source.partition(":")
        stem = path.rpartition("/")[2].removesuffix(".cu")
        expected = EXPECTED.get(f"{package}:{stem}", EXPECTED.get(stem, set()))
        checked |= {stem, f"{package}:{stem}"}
        # Products of float16 name no type, those of bfloat16 do.
        element = "" if "ELEMENT_F16" in dict(unit.defines) else ".BF16"
        products = {f"{opcode}{element}" for opcode in expected & {PRODUCTS, WIDE_PRODUCTS}}
        others = expected - {PRODUCTS, WIDE_PRODUCTS, ANY_WIDE}
        for function, opcodes in builds.opcodes(hardware, arch)[unit.module].items():
            found = {opcode if opcode.startswith(TENSOR) else opcode.partition(".")[0] for opcode in opcodes}
            assert others <= found, (unit.module, function)
            tensor = {opcode for opcode in found if opcode.startswith(TENSOR)}
            if ANY_WIDE in expected:
                wide = {opcode for opcode in tensor if opcode.startswith(ANY_WIDE)}
                assert wide, (unit.module, function)
                assert all(opcode.endswith(f".F32{element}") for opcode in wide), (unit.module, function)
                tensor -= wide
            assert tensor == products, (unit.module, function)
    assert {name for name in EXPECTED if ":" not in name or hardware == "hopper"} <= checked


@targets
def test_every_kernel_of_a_step_waits_for_its_predecessor(builds, hardware, arch):
    """They are launched so that they may begin early: one that does not wait reads what is not there yet."""
    for unit in builds.tree.units(hardware):
        if unit.module == "nvfp4_convert":  # no part of a step
            continue
        functions = builds.opcodes(hardware, arch)[unit.module]
        assert set(functions) == {entry.name for entry in unit.entries}
        assert [name for name, opcodes in functions.items() if ALONE not in opcodes] == [], unit.module


@on_sm_12x
def test_e2m1_conversions_are_one_instruction_and_twins_none(builds, hardware, arch):
    functions = builds.opcodes(hardware, arch)["nvfp4_convert"]
    for entry, opcode in E2M1.items():
        assert opcode in functions[entry]
        assert not any("E2M1" in found for found in functions[f"{entry}_twin"])


def test_elsewhere_e2m1_conversions_are_their_twins(builds):
    functions = builds.opcodes("gb10", "sm_90a")["nvfp4_convert"]
    assert not any("E2M1" in opcode for opcodes in functions.values() for opcode in opcodes)
    for entry in E2M1:
        assert functions[entry] == functions[f"{entry}_twin"]


@on_sm_12x
def test_narrow_products_are_single_tensor_core_instructions(builds, hardware, arch, tmp_path):
    functions = builds.opcodes_alone(
        builds.compile_alone(PROBES / "narrow_mma.cu", arch, tmp_path / "narrow.cubin"), arch
    )
    assert "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X" in functions["nvfp4"]
    assert "QMMA.16832.F32.E4M3.E2M1" in functions["e4m3_e2m1"]


@pytest.mark.parametrize("source", ["narrow_mma.cu"])
def test_targets_without_a_or_f_have_none_of_it(builds, source, tmp_path):
    with pytest.raises(KernelError, match="not supported on .target 'sm_121'"):
        builds.compile_alone(PROBES / source, "sm_121", tmp_path / "plain.cubin")


def test_sources_write_bulk_copies_to_their_own_block_only(builds):
    """``.shared::cluster`` as the target of a bulk copy is a call of the driver on sm_12x, and no faster on Hopper.

    Hopper's own sources may write to all blocks of a cluster at once.
    """
    texts = {}
    for hardware in ("hopper", "gb10"):
        for unit in builds.tree.units(hardware):
            for path in closure(unit.source, unit.includes, builds.tree.read):
                texts[path] = (builds.tree.read(path) or b"").decode()
    assert len(texts) > 10
    copies = {path: [line for line in text.splitlines() if "cp.async.bulk" in line] for path, text in texts.items()}
    wide = {path: [line for line in lines if "shared::cluster" in line] for path, lines in copies.items()}
    assert {path for path, lines in wide.items() if lines} <= {
        path for path in copies if path.startswith("atlas_plugin_hopper:")
    }
    assert [line for lines in wide.values() for line in lines if "multicast::cluster" not in line] == []
