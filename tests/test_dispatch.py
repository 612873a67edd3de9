"""What runs where: the capability table, explain, named implementations, fallbacks and their warning."""

import dataclasses
import warnings

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import assert_same_bits

from jax_mla import (
    _ffi,
    capabilities,
    dispatch,
    explain,
    mla_decode,
    mla_prefill,
    mla_sparse_decode,
    override_capabilities,
)
from jax_mla.dispatch import Capability
from jax_mla.heads import HeadCounts

KERNEL = 'custom_call_target="jax_mla_decode"'


def program(implementation, **options):
    inputs = cases.make(cases.DecodeCase("", (130, 20)))
    run = jax.jit(lambda *args: mla_decode(*args, implementation=implementation, **inputs.static, **options))
    return run.lower(*inputs.args).compile().as_text()


def test_cpu_kernels_are_built():
    """The CPU module is part of every build."""
    operations = {row.operation for row in capabilities("cpu")}
    assert operations >= {"mla_decode", "update_cache", "merge_states", "pack_kv", "pack_kv_fp8"}


@pytest.mark.gpu
@pytest.mark.skipif(dispatch.default_platform() == "rocm", reason="asks for an NVIDIA GPU")
def test_cuda_kernels_are_built():
    operations = {row.operation for row in capabilities("cuda")}
    packing = {"pack_kv", "pack_kv_fp8"}
    assert operations >= {"mla_decode", "mla_prefill", "mla_context", "update_cache", "merge_states"} | packing
    assert dispatch.default_platform() == "cuda"


@pytest.mark.skipif("cuda" not in _ffi.MODULES, reason="the CUDA module is not built")
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_cuda_table(target):
    """Every head count, and fp8 caches, from sm_80 on; nothing before it."""
    for q, cache in [(d, d) for d in ("bfloat16", "float16", "float8_e4m3fn")] + [
        ("bfloat16", "float8_e4m3fn"),
        ("float16", "float8_e4m3fn"),
    ]:
        for heads in (*range(1, 129), 144, 1024):
            choice = explain(num_heads=heads, q_dtype=q, cache_dtype=cache, page_size=1, target=target)
            assert choice.row is not None and choice.heads.padded_heads == heads, str(choice)
        assert explain(q_dtype=q, cache_dtype=cache, target="sm_75").row is None
    assert explain(cache_dtype="float8_e4m3fnuz", target=target).row is None


@pytest.mark.skipif("rocm" not in _ffi.MODULES, reason="the ROCm module is not built")
@pytest.mark.parametrize("target, own, other", [("gfx942", "e4m3fnuz", "e4m3fn"), ("gfx950", "e4m3fn", "e4m3fnuz")])
def test_rocm_table(target, own, other):
    """Multiples of 16, and 24, are native and others padded; fp8 caches of the architecture's own format; by name."""
    if not capabilities(target):
        pytest.skip(f"this build has no {target}")
    heads_of = {row.reducer_heads for row in capabilities(target) if row.operation == "mla_decode"}
    for heads, padded in [*((n, n) for n in range(16, 129, 16)), (24, 24), (17, 24), (1, 16), (31, 32), (144, 144)]:
        if any(padded not in counts for counts in heads_of):
            padded = 32  # a build may leave 24 out of the reduction
        for cache in ("bfloat16", f"float8_{own}", "fp8_ds_mla"):
            choice = explain(num_heads=heads, cache_dtype=cache, implementation=f"rocm:{target}", target=target)
            assert choice.row is not None and choice.heads.padded_heads == padded, str(choice)
    assert explain(cache_dtype=f"float8_{other}", implementation=f"rocm:{target}", target=target).row is None
    for operation in ("mla_decode", "update_cache", "merge_states", "pack_kv"):
        assert "not passed its tests on hardware" in explain(operation, target=target).reason

    inputs = cases.make(cases.DecodeCase("", (130, 20), heads=17))
    run = jax.jit(lambda *args: mla_decode(*args, implementation=f"rocm:{target}", **inputs.static))
    text = run.trace(*inputs.args).lower(lowering_platforms=("rocm",)).as_text()
    assert "@jax_mla_plan_decode(" in text and "@jax_mla_decode(" in text and "dot_general" not in text
    assert f"tensor<2x{32 if any(24 not in c for c in heads_of) else 24}x576xbf16>" in text


def test_a_named_implementation_runs_its_kernel():
    for name in ("cpu", "cpu:portable"):
        assert KERNEL in program(name)
    assert KERNEL not in program("xla")


def test_none_takes_the_best(monkeypatch):
    monkeypatch.setattr(dispatch, "_default_device", lambda: ("cpu", jax.devices("cpu")[0]))
    assert KERNEL in program(None)
    best = capabilities("cpu")[0]
    assert explain(target="cpu").row == best and explain(target="cpu").implementation == best.implementation


def attention(operation, implementation, cache_dtype):
    """(out, lse) of an operation on random data, 24 heads and bf16 queries, by that implementation."""
    rng = np.random.default_rng(3)

    def random(*shape, dtype="bfloat16"):
        return rng.standard_normal(shape, np.float32).astype(cases.dtype(dtype))

    options = {"scale": cases.SCALE, "implementation": implementation}
    if operation == "mla_prefill":
        ends, values = np.array([0, 70, 200], np.int32), random(200, 24, 128, dtype=cache_dtype)
        call, operands = mla_prefill, (random(200, 24, 192), random(200, 24, 192), values, ends, ends)
        options["causal"] = True
    elif operation == "mla_sparse_decode":
        cache, indices = random(9, 64, 576, dtype=cache_dtype), rng.integers(0, 9 * 64, (3, 300), np.int32)
        call, operands = mla_sparse_decode, (random(3, 24, 576), cache, indices)
    else:
        inputs = cases.make(cases.DecodeCase("", (500, 130), cache_dtype=cache_dtype))
        call, operands = mla_decode, inputs.args
        options = inputs.static | {"implementation": implementation}
    return jax.jit(lambda *operands: call(*operands, **options))(*operands)


@pytest.mark.parametrize(
    "operation, cache_dtype",
    [
        ("mla_decode", "bfloat16"),
        ("mla_decode", "float8_e4m3fn"),
        ("mla_sparse_decode", "bfloat16"),
        ("mla_sparse_decode", "float8_e4m3fn"),
        ("mla_prefill", "bfloat16"),
    ],
)
@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_explain_names_is_what_runs(platform, operation, cache_dtype):
    """By default, and by a platform's name alone: the bits of the named variant, and not those of another."""
    with jax.default_device(jax.devices("cpu" if platform == "cpu" else "gpu")[0]):
        choice = explain(operation, cache_dtype=cache_dtype, target=platform)
        named = attention(operation, choice.implementation, cache_dtype)
        assert_same_bits(named, attention(operation, platform, cache_dtype))
        if dispatch.default_platform() == platform:
            assert_same_bits(named, attention(operation, None, cache_dtype))
        others = {row.implementation for row in capabilities(platform) if row.operation == operation}
        for other in others - {choice.implementation}:
            if explain(operation, cache_dtype=cache_dtype, implementation=other, target=platform).row is not None:
                out, _ = attention(operation, other, cache_dtype)
                assert not np.array_equal(np.asarray(named[0]), np.asarray(out)), f"{other} has the same bits"


def test_table_covers_what_the_design_promises():
    """Every head count, float dtype and fp8 format on the CPU; every variant listed is compiled in."""
    for q, cache in [(d, d) for d in ("bfloat16", "float16", "float32", "float8_e4m3fn")] + [
        ("bfloat16", "float8_e4m3fn"),
        ("float16", "float8_e4m3fnuz"),
    ]:
        for heads in (*range(1, 129), 144, 1024):
            choice = explain(num_heads=heads, q_dtype=q, cache_dtype=cache, target="cpu")
            assert choice.row is not None and choice.heads.padded_heads == heads, str(choice)
    names = {row.variant for row in capabilities("cpu")}
    assert names <= set(_ffi.MODULES["cpu"].variants()) and "portable" in names


def test_targets_filter_the_table():
    everything = capabilities()
    assert set(capabilities("cpu")) <= set(everything)
    assert {row.platform for row in capabilities("cpu")} <= {"cpu"}
    assert {row.implementation for row in capabilities("cpu:portable")} <= {"cpu:portable"}
    assert all(row.platform == "cuda" for row in capabilities("sm_90"))
    for wrong in ("tpu", "sm90", "x86"):
        with pytest.raises(ValueError, match="target is"):
            capabilities(wrong)


def row(platform="cuda", architecture="sm_80+", **changes):
    some = HeadCounts(((1, 128, 1),))
    values = {"variant": "generic", "q_dtype": "bfloat16", "cache_dtype": "bfloat16"}
    values |= {"planner_heads": some, "reducer_heads": some, "tile_rows": (16, 64)}
    return Capability(operation="mla_decode", platform=platform, architecture=architecture, **(values | changes))


def test_explain_names_what_decided():
    """Each refusal says why: platform, variant, architecture, dtypes, query lengths, heads."""
    table = [row(), row(max_q_len=2, q_dtype="float16", cache_dtype="float16"), row("rocm", "gfx950")]
    with override_capabilities(table):
        served = explain(num_heads=24, target="sm_90")
        assert served.row == table[0] and str(served).startswith("cuda: cuda:generic: sm_80+, q bfloat16")
        assert "24 heads native" in served.reason
        assert explain(target="sm_75").row is None and "on sm_75" in explain(target="sm_75").reason
        assert explain(target="gfx950").row == table[2]
        assert "on gfx942" in explain(target="gfx942").reason
        assert "no cpu kernel for mla_decode" in explain(target="cpu").reason
        assert "float32" in explain(q_dtype=jnp.float32, target="cuda").reason
        long = explain(q_dtype="float16", q_len=3, target="cuda")
        assert long.row is None and "takes 3 query tokens" in long.reason
        assert "no head count from 144 on" in explain(num_heads=144, target="cuda").reason
        assert explain(implementation="xla").implementation == "xla"
        assert "another platform" in explain(implementation="rocm", target="cuda").reason
        assert explain("update_cache", target="cuda").row is None
    assert explain("mla_sparse_decode", target="rocm").implementation == "xla"


def test_tile_rows_fit_the_query_rows():
    """The smallest tile that holds all (query, head) rows of a sequence, else the largest there is."""
    with override_capabilities([row(tile_rows=(16, 32, 64))]):
        sizes = {
            (h, q): explain(num_heads=h, q_len=q, target="cuda").heads.tile_rows
            for h, q in [(1, 1), (16, 1), (17, 1), (24, 1), (24, 2), (64, 1), (128, 1), (128, 4)]
        }
    assert list(sizes.values()) == [16, 16, 32, 32, 64, 64, 64, 64]


def test_tile_rows_of_several_tiles():
    """As few tiles as there can be: the smallest that do, or the largest where the row says so."""
    shapes = [(24, 1), (48, 1), (49, 1), (64, 1), (65, 1), (96, 1), (24, 4), (112, 1), (128, 1), (48, 3)]
    for largest, expected in ((False, [24, 48, 64, 64, 48, 48, 48, 64, 64, 48]), (True, [24, 48, *[64] * 8])):
        with override_capabilities([row(tile_rows=(8, 24, 48, 64), largest_if_several=largest)]):
            chosen = [explain(num_heads=h, q_len=q, target="cuda").heads for h, q in shapes]
        assert [heads.tile_rows for heads in chosen] == expected
        assert [heads.row_tiles for heads in chosen] == [1, 1, 1, 1, 2, 2, 2, 2, 2, 3]


def test_a_row_for_one_architecture_and_some_pages():
    """Hopper's kernel comes first where it runs; other GPUs and other pages get the tiles of the row behind it."""
    sizes = HeadCounts(((16, 32, 16), (64, 4096, 64)))
    hopper = row(variant="sm90", architecture="sm_90", tile_rows=(8, 24, 48), page_sizes=sizes)
    with override_capabilities([hopper, row()]):
        for page_size in (16, 32, 64, 192):
            choice = explain(num_heads=24, page_size=page_size, target="sm_90")
            assert choice.row == hopper and choice.heads.tile_rows == 24
        for page_size in (1, 48, 63, 96, 8192):
            choice = explain(num_heads=24, page_size=page_size, target="sm_90")
            assert choice.row == row() and choice.heads.tile_rows == 64
        for target in ("sm_80", "sm_89", "sm_100", "sm_120"):
            assert explain(num_heads=24, target=target).row == row()
        assert explain(num_heads=24, target="cuda").heads.tile_rows == 24
    with override_capabilities([hopper]):
        refused = explain(page_size=48, target="sm_90")
        assert refused.row is None and "takes pages of 48 tokens" in refused.reason
        assert "on sm_100" in explain(target="sm_100").reason


def test_a_row_for_positive_scales_alone():
    """Other scales go to the row behind it; by its name they are refused, with the scale."""
    table = [row(variant="sm90", positive_scale=True), row()]
    table = [dataclasses.replace(x, operation="mla_prefill") for x in table]

    def chosen(scale):
        dtypes = {"q_dtype": "bfloat16", "cache_dtype": "bfloat16"}
        return dispatch.select("mla_prefill", implementation="cuda", scale=scale, **dtypes)[0].row

    with override_capabilities(table):
        assert [chosen(scale) for scale in (0.1, None, 0.0, -1.0)] == [*table[:1] * 2, *table[1:] * 2]
    with override_capabilities(table[:1]), pytest.raises(NotImplementedError, match=r"takes scale -0\.5"):
        chosen(-0.5)


def test_a_row_by_name_alone():
    """Neither None nor the platform chooses it, its variant's name does; a row behind it is found."""
    table = [dataclasses.replace(row("cpu", "x86_64", variant="portable", by_name=True), operation="mla_prefill")]
    dtypes = {"q_dtype": "bfloat16", "cache_dtype": "bfloat16"}
    with override_capabilities(table):
        assert dispatch.select("mla_prefill", implementation="cpu:portable", **dtypes)[0].row == table[0]
        assert [c.row for c in dispatch.select("mla_prefill", implementation=None, **dtypes)] in ([], [None])
        with pytest.raises(NotImplementedError, match="has not passed its tests on hardware"):
            dispatch.select("mla_prefill", implementation="cpu", **dtypes)
    behind = dataclasses.replace(row("cpu", "x86_64"), operation="mla_prefill")
    with override_capabilities([*table, behind]):
        assert dispatch.select("mla_prefill", implementation="cpu", **dtypes)[0].row == behind


def test_override_ends_with_its_context():
    before = capabilities()
    with override_capabilities([row()]):
        assert capabilities() == (row(),)
        with override_capabilities([]):
            assert capabilities() == ()
        assert capabilities() == (row(),)
    assert capabilities() == before


def test_fallback_on_a_gpu_warns_once(monkeypatch):
    """XLA on a GPU is several times slower: said once for each reason, and not on the CPU."""
    inputs = cases.make(cases.DecodeCase("", (13, 2)))
    truth = oracle.decode(*inputs.args, **inputs.static)
    dispatch._warn_once.cache_clear()
    with override_capabilities([]):
        oracle.assert_attention(mla_decode(*inputs.args, **inputs.static), truth, 1e-2)
        monkeypatch.setattr(dispatch, "_default_device", lambda: ("cuda", jax.devices()[0]))
        with pytest.warns(UserWarning, match="mla_decode runs through XLA on this GPU, several times slower"):
            mla_decode(*inputs.args, **inputs.static)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mla_decode(*inputs.args, **inputs.static)
            mla_decode(*inputs.args, implementation="xla", **inputs.static)
    dispatch._warn_once.cache_clear()


def test_layouts_without_a_kernel_run_through_xla():
    """A cache that no row takes: None serves it through XLA, a named kernel says why not."""
    inputs = cases.make(cases.DecodeCase("", (70, 9), cache_dtype=cases.DS_MLA))
    with override_capabilities(row for row in capabilities() if row.cache_dtype != cases.DS_MLA):
        got = mla_decode(*inputs.args, **inputs.static)
        oracle.assert_attention(got, oracle.decode(*inputs.args, **inputs.static), 1e-2)
        with pytest.raises(NotImplementedError, match="no cpu kernel for mla_decode with q bfloat16 over a fp8_ds_mla"):
            mla_decode(*inputs.args, implementation="cpu", **inputs.static)


def test_rows_are_plain_data():
    for entry in capabilities():
        assert isinstance(entry.implementation, str)
        assert all(
            isinstance(value, (str, int, tuple, HeadCounts, type(None)))
            for value in (getattr(entry, field.name) for field in dataclasses.fields(entry))
        )
        assert np.all(np.diff(entry.tile_rows) > 0)
