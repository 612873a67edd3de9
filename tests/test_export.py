"""Lowering for GPUs from a machine without one, and jax.export."""

import contextlib
import dataclasses
from functools import partial

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import assert_same_bits

import jax_mla
from jax_mla import KernelValues, _ffi, dispatch, mla_decode, mla_prefill, override_capabilities, update_cache

TARGETS = {"mla_decode": "jax_mla_decode", "plan_decode": "jax_mla_plan_decode", "update_cache": "jax_mla_update_cache"}


@contextlib.contextmanager
def kernels_for(*platforms):
    """A table in which each platform has the CPU's kernels: which module is built here does not matter for lowering."""
    rows = jax_mla.capabilities("cpu")
    with override_capabilities(dataclasses.replace(row, platform=p) for p in platforms for row in rows):
        yield


@pytest.fixture(scope="module")
def inputs():
    return cases.make(cases.DecodeCase("", (130, 20), layers=2, layer=1))


def step(implementation, static):
    def run(q, cache, page_table, kv_lens, new, layer):
        where = jax_mla.slots(page_table, kv_lens - 1, 64)
        cache = update_cache(cache, new[:, :512], new[:, 512:], where, layer=layer, implementation=implementation)
        return mla_decode(q, cache, page_table, kv_lens, layer=layer, implementation=implementation, **static), cache

    return jax.jit(run, donate_argnums=1)


def operands(inputs):
    new = np.random.default_rng(0).standard_normal((2, 576)).astype(inputs.cache.dtype)
    return (*inputs.args, new, np.int32(1))


@pytest.mark.parametrize("kind", ["bfloat16", KernelValues.KIND])
def test_fp8_prefill_lowers_for_a_gpu(kind):
    """Keys and values in the layouts that its row names reach the kernel as they are, under vmap in whole tiles too."""
    fp8 = jnp.float8_e4m3fn
    q, k = jnp.zeros((2, 12, 4, 192), fp8), jnp.zeros((2, 17, 4, 192), fp8)
    v = jnp.zeros((2, 17, 4, 128), kind) if kind == "bfloat16" else KernelValues(jnp.zeros((2, 2, 4, 128, 16), fp8), 17)
    cu = jnp.array([0, 7, 10], jnp.int32)
    row = dispatch.Capability("mla_prefill", "cuda", "sm90", "sm_90", "float8_e4m3fn", kind)
    run = partial(mla_prefill, cu_q_lens=cu, cu_kv_lens=cu, causal=True, scale=0.07)
    shapes = {"bfloat16": ("17x4x128xbf16", "34x4x128xbf16")}
    one, mapped = shapes.get(kind, ("2x4x128x16xf8E4M3FN", "4x4x128x16xf8E4M3FN"))
    with override_capabilities([row]):
        for function, operands, values in (
            (run, jax.tree.map(lambda x: x[0], (q, k, v)), one),
            (jax.vmap(run), (q, k, v), mapped),
        ):
            text = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
            call = next(line for line in text.splitlines() if "@jax_mla_prefill(" in line)
            assert f"tensor<{values}>" in call and "dot_general" not in text


@pytest.mark.parametrize("stored", [17, 5000])
def test_fp8_prefill_on_gfx950_has_scratch(stored):
    """Its plan and partial results are a third result, of a size that follows from shapes."""
    fp8 = jnp.float8_e4m3fn
    q, k, v = jnp.zeros((12, 4, 192), fp8), jnp.zeros((stored, 4, 192), fp8), jnp.zeros((stored, 4, 128), fp8)
    cu_q_lens, cu_kv_lens = jnp.array([0, 7, 10], jnp.int32), jnp.array([0, 7, 17], jnp.int32)
    row = dispatch.Capability("mla_prefill", "rocm", "gfx950", "gfx950", "float8_e4m3fn", "float8_e4m3fn")
    run = jax.jit(partial(mla_prefill, causal=True, scale=0.07, implementation="rocm"))
    with override_capabilities([row]):
        text = run.trace(q, k, v, cu_q_lens, cu_kv_lens).lower(lowering_platforms=("rocm",)).as_text()
    call = next(line for line in text.splitlines() if "@jax_mla_prefill(" in line)
    assert f"tensor<{_ffi.prefill_scratch_bytes(12, stored, 4, 2)}xui8>" in call


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("named", [False, True], ids=["best", "named"])
def test_lowering_from_the_cpu(named, platform, inputs):
    """A CPU host lowers for a GPU: custom calls of that platform, the alias kept, no XLA branch left."""
    with kernels_for("cuda", "rocm"):
        run = step(platform if named else None, inputs.static)
        text = run.trace(*operands(inputs)).lower(lowering_platforms=(platform,)).as_text()
    for target in TARGETS.values():
        assert text.count(f"@{target}(") == 1
    assert "output_operand_alias" in text
    assert "dot_general" not in text


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_lowering_without_a_kernel(platform, inputs):
    """Where the platform has no kernel, the program for it is XLA's; a named implementation refuses."""
    with kernels_for("cpu"):
        text = step(None, inputs.static).trace(*operands(inputs)).lower(lowering_platforms=(platform,)).as_text()
        assert "custom_call @jax_mla" not in text and "dot_general" in text
        with pytest.raises(NotImplementedError, match=f"implementation='{platform}' cannot serve this call"):
            step(platform, inputs.static).trace(*operands(inputs))


def test_one_program_for_several_platforms(inputs):
    """The choice is made for each platform of one program."""
    with kernels_for("cpu", "cuda"):
        run = step(None, inputs.static)
        traced = run.trace(*operands(inputs))
        text = traced.lower(lowering_platforms=("cpu", "cuda", "rocm")).as_text()
    assert "@jax_mla_decode" in text and "dot_general" in text


def test_keys_are_packed_for_one_platform_of_several():
    """mla_prefill's keys in parts: packed in the branch of the platform whose kernel takes whole ones, and no other."""
    rows = [row for row in jax_mla.capabilities("cpu") if row.operation == "mla_prefill"]
    table = [
        dataclasses.replace(row, platform=p, key_parts=p != "rocm") for p in ("cpu", "cuda", "rocm") for row in rows
    ]
    pair = jnp.zeros((9, 4, 256), jnp.bfloat16), jnp.zeros((9, 64), jnp.bfloat16)
    q, cu = jnp.zeros((5, 4, 192), jnp.bfloat16), jnp.zeros(2, jnp.int32)
    run = jax.jit(partial(mla_prefill, causal=True, scale=0.07, value_offset=128))
    with override_capabilities(table):
        traced = run.trace(q, pair, pair[0], cu, cu)
        for platforms, packed in ((("cuda",), 0), (("rocm",), 1), (("cpu", "cuda", "rocm"), 1)):
            text = traced.lower(lowering_platforms=platforms).as_text()
            assert text.count("@jax_mla_pack_kv(") == packed
            assert text.count("@jax_mla_prefill(") == len(platforms)


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda", "rocm")])
def test_export_round_trip(platforms, inputs):
    """Exported with the published names allowed, serialised, read back and called."""
    run = step(None, inputs.static)
    exported = jax.export.export(run, platforms=platforms, disabled_checks=jax_mla.export_checks())(*operands(inputs))
    back = jax.export.deserialize(exported.serialize())
    assert back.platforms == platforms
    got, cache = back.call(*operands(inputs))
    want, want_cache = run(*operands(inputs))
    assert_same_bits((*got, cache), (*want, want_cache))
    truth = oracle.decode(inputs.q, want_cache, inputs.page_table, inputs.kv_lens, layer=1, **inputs.static)
    oracle.assert_attention(got, truth, 1e-2)


def test_export_needs_the_published_names(inputs):
    """Without them jax.export refuses our custom calls; with them every operation passes."""
    with pytest.raises(ValueError, match="jax_mla_"):
        jax.export.export(step(None, inputs.static), platforms=("cpu",))(*operands(inputs))
    assert len(jax_mla.export_checks()) == len(jax_mla.CUSTOM_CALL_TARGETS)
    state = np.zeros((3, 2, 128), np.float32), np.zeros((3, 2), np.float32)

    def others(out, lse, kv_up, k_pe):
        return jax_mla.merge_states(out, lse, out, lse), jax_mla.pack_kv(kv_up, k_pe), jax_mla.pack_kv_fp8(kv_up, k_pe)

    arrays = (*state, jnp.zeros((3, 2, 256)), jnp.zeros((3, 64)))
    exported = jax.export.export(jax.jit(others), platforms=("cpu",), disabled_checks=jax_mla.export_checks())(*arrays)
    text = exported.mlir_module()
    for name in ("merge_states", "pack_kv", "pack_kv_fp8"):
        assert f"@jax_mla_{name}" in text


def test_plan_made_here_is_not_for_another_platform(inputs):
    """A plan belongs to one target: lowered for another one, the program refuses it instead of reading it wrongly."""
    with kernels_for("cpu", "cuda"):
        plan = jax_mla.plan_decode(
            jnp.asarray(inputs.kv_lens), num_heads=24, cache=jax.ShapeDtypeStruct(inputs.cache.shape, "bfloat16")
        )
        run = jax.jit(partial(mla_decode, implementation="cuda", **inputs.static))
        with pytest.raises(ValueError, match="plan was made for cpu"):
            run.trace(*inputs.args, layer=np.int32(1), plan=plan)
