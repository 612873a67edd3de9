"""The tables made from machine code: their page, and the cycle model against LLVM's."""

import ctypes
import re
import subprocess

import numpy as np
import pytest
from gfx9 import compile_hip, cycles, marks, params, tables
from gfx9.compile import HIP_FLAGS
from gfx9.launch import Program
from gfx9.samples import gemm_entry, load
from gfx9.tools import find, tool

pytestmark = marks.needs_llvm


def test_the_page_is_up_to_date():
    """Another release of the compiler makes other code: then the page has the same rows, with other numbers."""
    entries = tables.entries()
    for entry in entries:
        kernel = entry.program.kernels[entry.kernel]
        assert kernel.vgpr_spills == kernel.sgpr_spills == kernel.scratch == 0, entry.kernel
    made, kept = tables.page(entries), tables.PAGE.read_text()
    if tables.compiler() in kept:
        assert made == kept, "run python tests/gfx9/tables.py"
    else:
        names = re.compile(r"^\| (\w+ \| gfx\d+) \|", re.MULTILINE)
        assert names.findall(made) == names.findall(kept)


@marks.both_architectures
def test_a_tile_of_the_sample(architecture):
    """64 x 64 outputs from 32 values of k: 4 waves of one 32x32 tile."""
    entry = gemm_entry(architecture)
    cost = entry.cost()
    products = {"gfx942": 4, "gfx950": 2}[architecture]  # matrix instructions of a wave, of 8 or 16 values of k
    assert cost.instructions["matrix"] == 4 * products
    assert cost.matrix == 32 * products
    reads = {"gfx942": 128, "gfx950": 256}[architecture]
    assert cost.lds == 2 * 64 * 32 * 2 / 128 + 4 * 2 * 32 * 32 * 2 / reads  # written once, read by each wave
    assert cost.requested == 2 * 64 * 32 * 2 + 256 * 4  # rows of A and B; each thread reads the page table
    device = cycles.HARDWARE[architecture]
    assert cost.hbm == pytest.approx(entry.tile_bytes / (device.bandwidth / device.compute_units / device.clock))
    assert cost.vector == cost.instructions["vector"]  # 4 cycles on one of 4 SIMDs, and none at quarter rate
    assert cost.issue > cost.matrix + cost.vector
    assert cost.hbm_share == 1  # HBM is the slowest
    assert cost.matrix_share == cost.matrix / max(cost.issue, cost.lds)


@marks.both_architectures
def test_structs_are_the_compilers(architecture):
    """Sizes and last fields, as a device compiler lays out kernels/params.h."""
    checks = ['#include "kernels/params.h"', "#include <cstddef>"]
    for name in (
        "WorkItem",
        "DecodeParams",
        "SparseDecodeParams",
        "PrefillParams",
        "GatherContextParams",
        "PackKvParams",
    ):
        made = params.struct(name)
        field = made._fields_[-1][0]
        checks.append(f"static_assert(sizeof(mla::{name}) == {ctypes.sizeof(made)});")
        checks.append(f"static_assert(offsetof(mla::{name}, {field}) == {getattr(made, field).offset});")
    checks += [f"static_assert(static_cast<int>(mla::DType::k{kind.name}) == {kind});" for kind in params.DType]
    assert compile_hip("\n".join(checks), architecture)


def test_classes():
    for text, kind in {
        "v_mfma_f32_16x16x32_bf16": "matrix",
        "v_add_f32_e32": "vector",
        "v_exp_f32_e32": "quarter rate",
        "v_cvt_pk_fp8_f32": "quarter rate",
        "v_cvt_scalef32_pk_bf16_fp8": "quarter rate",
        "v_cvt_pk_bf16_f32": "vector",
        "ds_read_b128": "LDS",
        "global_load_lds_dwordx4": "global load",
        "flat_load_dword": "global load",
        "global_store_dwordx4": "global store",
        "global_atomic_add_f32": "global store",
        "s_add_u32": "scalar",
        "s_load_dwordx4": "other",
        "s_waitcnt": "other",
        "s_cbranch_scc0": "other",
    }.items():
        assert cycles.class_of(text) == kind, text
    assert cycles.issue_cycles("s_nop 3") == 16


INSTRUCTIONS = {  # and whether only gfx950 has it
    "v_add_f32 v0, v1, v2": False,
    "v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]": False,
    "v_mul_lo_u32 v0, v1, v2": False,
    "v_perm_b32 v0, v1, v2, v3": False,
    "v_exp_f32 v0, v1": False,
    "v_log_f32 v0, v1": False,
    "v_rcp_f32 v0, v1": False,
    "v_rsq_f32 v0, v1": False,
    "v_cvt_f16_f32 v0, v1": False,
    "v_cvt_pk_fp8_f32 v0, v1, v2": False,
    "v_cvt_pkrtz_f16_f32 v0, v1, v2": False,
    "v_cvt_pk_bf16_f32 v0, v1, v2": True,
    "v_mfma_f32_32x32x2_f32 a[0:15], v0, v1, a[0:15]": False,
    "v_mfma_f32_16x16x4_f32 a[0:3], v0, v1, a[0:3]": False,
    "v_mfma_f32_32x32x8_f16 a[0:15], v[0:1], v[2:3], a[0:15]": False,
    "v_mfma_f32_16x16x16_f16 a[0:3], v[0:1], v[2:3], a[0:3]": False,
    "v_mfma_f32_32x32x16_fp8_fp8 a[0:15], v[0:1], v[2:3], a[0:15]": False,
    "v_mfma_f32_16x16x32_fp8_fp8 a[0:3], v[0:1], v[2:3], a[0:3]": False,
    "v_mfma_f32_32x32x16_bf16 a[0:15], v[0:3], v[4:7], a[0:15]": True,
    "v_mfma_f32_16x16x32_bf16 a[0:3], v[0:3], v[4:7], a[0:3]": True,
}


@marks.both_architectures
def test_cycles_against_the_scheduling_model_of_llvm(architecture):
    """Its units are turns of 4 cycles: a matrix instruction's throughput, a quarter-rate one's latency."""
    mca = find("llvm-mca")
    assert mca, "llvm-mca comes with llvm-objdump"
    texts = [text for text, gfx950 in INSTRUCTIONS.items() if architecture == "gfx950" or not gfx950]
    command = [mca, "-mtriple=amdgcn", f"-mcpu={architecture}"]
    out = subprocess.run(command, input="\n".join(texts), capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"^ (\d+) +(\d+) +(\d+\.\d+) .*\t?(v_\w+.*)$", out, re.MULTILINE)
    assert len(rows) >= len(texts)
    for (_, latency, throughput, _), text in zip(rows, texts, strict=False):
        turns = float(throughput) if "mfma" in text else int(latency)
        assert cycles.issue_cycles(text) == 4 * turns, text


def test_cycles_of_8_bit_matrix_instructions():
    """By the guide's table, since LLVM has half of it."""
    assert cycles.matrix_cycles("v_mfma_f32_32x32x64_f8f6f4") == 64
    assert cycles.matrix_cycles("v_mfma_scale_f32_16x16x128_f8f6f4") == 32


@marks.both_architectures
@pytest.mark.parametrize("waves", [1, 4, 8])
@pytest.mark.parametrize("registers", [24, 64, 72, 96, 128, 160, 192, 240])
def test_occupancy_against_the_compiler(architecture, waves, registers):
    """Waves a SIMD, as clang remarks for a kernel that needs so many vector registers and few scalar ones."""
    text = f"""
      extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size({64 * waves}, {64 * waves})))
      void kernel(int* out) {{
        asm volatile("" ::: "v{registers - 1}");
        out[__builtin_amdgcn_workitem_id_x()] = 1;
      }}"""
    command = [tool("clang"), *HIP_FLAGS, f"--offload-arch={architecture}", "-Rpass-analysis=kernel-resource-usage"]
    done = subprocess.run([*command, "-", "-o", "/dev/null"], input=text, capture_output=True, text=True, check=True)
    remarked = int(re.search(r"Occupancy \[waves/SIMD\]: (\d+)", done.stderr)[1])
    kernel = Program(compile_hip(text, architecture), architecture).kernels["kernel"]
    assert kernel.vgprs == registers
    assert cycles.occupancy(kernel, architecture, 64 * waves).workgroups == 4 * remarked // waves


def test_lds_limits_occupancy():
    kernel = load("gemm", "gfx942").kernels["gemm"]
    fits = cycles.occupancy(kernel, "gfx942", 256, dynamic_lds=30 << 10)
    assert (fits.workgroups, fits.waves_a_simd, fits.limit) == (1, 1, "LDS")


def test_an_entry_of_other_lengths_costs_the_same():
    entry = gemm_entry("gfx950")
    costs = [cycles.cost(entry.program, 256, entry.run(a), entry.run(b), b - a, 1) for a, b in ((1, 2), (3, 8))]
    assert costs[0] == costs[1]
    assert np.isclose(costs[0].hbm, 1 / cycles.HARDWARE["gfx950"].bytes_a_cycle)
