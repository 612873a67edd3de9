"""The work split of decode: planners on every device against the loop, its bounds, and the DecodePlan that holds it."""

import dataclasses
from functools import partial

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import assert_same_bits, native_only, served_or_refused

import jax_mla
from jax_mla import _ffi, mla_decode, plan_decode, reference
from jax_mla.heads import HeadSpecification

OPERATION = "mla_decode"
LENGTHS = (0, -3, -(2**31), 1, 2, 63, 64, 65, 500, 2000, 2049, 5000, 30000)


def compiled(implementation, heads, overhead_blocks, min_part_blocks):
    """A planner as (kv_lens, cu_q_lens) -> items, part_offsets, tile_splits."""
    costs = {"overhead_blocks": overhead_blocks, "min_part_blocks": min_part_blocks}
    if implementation != "xla":
        return jax.jit(partial(_ffi.plan_decode, heads=heads, **costs))
    fields = {name: getattr(heads, name) for name in ("max_q_len", "tile_rows", "parts", "batch_invariant")}
    return jax.jit(partial(reference.plan_decode, num_heads=heads.padded_heads, **fields, **costs))


SHAPES = (  # batch, heads, max_q_len, tile_rows, parts, overhead_blocks, min_part_blocks
    (1, 24, 1, 32, 8, 1, 8),
    (7, 24, 1, 32, 8, 1, 8),
    (6, 128, 1, 64, 132, 5, 2),
    (3, 1, 1, 16, 264, 5, 2),
    (5, 17, 4, 16, 13, 0, 1),
    (4, 96, 3, 256, 2, 1, 8),
    (600, 24, 1, 32, 132, 5, 2),
)


@pytest.mark.leave_out("*:*")  # one planner for all variants
@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "ragged"])
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["balanced", "invariant"])
def test_planners_agree_with_the_loop(batch_invariant, ragged, implementation):
    """Every planner writes the same plan, bit for bit, unused items included, and it fits into the arrays."""
    rng = np.random.default_rng(0)
    for batch, num_heads, max_q_len, tile_rows, parts, overhead, least in SHAPES:
        heads = HeadSpecification(num_heads, num_heads, max_q_len, tile_rows, parts, batch_invariant)
        run = compiled(implementation, heads, overhead, least)
        for trial in range(1 if batch > 100 else 4):
            lengths = rng.choice(LENGTHS, batch).astype(np.int32)
            if trial == 3:
                lengths[:] = 0
            cu = None
            if ragged:
                cu = np.concatenate([[0], np.cumsum(rng.integers(0, max_q_len + 2, batch))]).astype(np.int32)
            items, offsets, splits = map(np.asarray, run(lengths, cu))
            want_items, want_offsets, want_splits = oracle.plan(
                lengths,
                cu,
                heads=num_heads,
                max_q_len=max_q_len,
                tile_rows=tile_rows,
                parts=parts,
                overhead_blocks=overhead,
                min_part_blocks=least,
                batch_invariant=batch_invariant,
            )
            assert items.shape == (heads.max_items(batch), 8)
            assert len(want_items) <= heads.max_items(batch)
            assert sum(count for _, count in want_splits if count >= 2) <= heads.max_partials(batch)
            used = len(want_items)
            np.testing.assert_array_equal(items[:used], np.reshape(want_items, (-1, 8)))
            np.testing.assert_array_equal(items[used:], 0)
            np.testing.assert_array_equal(offsets, want_offsets)
            np.testing.assert_array_equal(splits, want_splits)


def test_hostile_values(implementation):
    """Lengths near 2^31 and offsets of any value: a plan that still fits into its arrays."""
    rng = np.random.default_rng(1)
    for batch_invariant in (False, True):
        heads = HeadSpecification(24, 24, 3, 32, 16, batch_invariant)
        run = compiled(implementation, heads, 1, 8)
        for _ in range(10):
            lengths = rng.choice([0, -1, 100, 2**31 - 1, 2**31 - 64, -(2**31)], 8).astype(np.int32)
            cu = rng.choice([0, 1, 2, -1, 2**31 - 1, -(2**31)], 9).astype(np.int32)
            items, offsets, splits = map(np.asarray, run(lengths, cu))
            assert offsets[0] == 0 and np.all(np.diff(offsets) >= 0) and offsets[-1] <= len(items)
            assert np.all(items[:, 2] >= 0) and np.all(items[:, 3] >= items[:, 2])
            assert splits[:, 1].sum() == offsets[-1]
            assert np.where(splits[:, 1] >= 2, splits.sum(axis=1), 0).max() <= heads.max_partials(8)


def test_invariant_splits_depend_on_the_own_length_alone(implementation):
    """With batch_invariant a tile's pieces are the same in every batch."""
    heads = HeadSpecification(24, 24, 1, 32, 16, True)
    run = compiled(implementation, heads, 1, 8)
    rng = np.random.default_rng(2)
    pieces = {}
    for _ in range(12):
        lengths = rng.choice([1, 64, 2048, 2049, 5000, 40000, 100000], 6).astype(np.int32)
        items, offsets, _ = map(np.asarray, run(lengths, None))
        for request, length in enumerate(lengths):
            own = [tuple(item[2:4]) for item in items[: offsets[-1]] if item[0] == request]
            assert pieces.setdefault(int(length), own) == own


def make_plan(implementation, lengths, cache=(9, 64, 576), dtype="bfloat16", num_heads=24, **options):
    shape = jax.ShapeDtypeStruct(cache, dtype)
    return plan_decode(jnp.asarray(lengths), num_heads=num_heads, cache=shape, implementation=implementation, **options)


@pytest.mark.parametrize("name", ["ragged", "fp8_stacked", "long_and_short"])
def test_one_plan_serves_every_layer(name, implementation):
    """A plan made once gives the bits of a call that makes its own; made inside jit, as an argument, in a scan."""
    case = cases.BY_NAME[name]
    inputs = cases.make(case)
    options = {"num_heads": case.heads, "cache": jax.ShapeDtypeStruct(inputs.cache.shape, inputs.cache.dtype)}
    if case.ragged:
        options |= {"max_q_len": inputs.static["max_q_len"], "cu_q_lens": jnp.asarray(inputs.arrays["cu_q_lens"])}
    else:
        options["q_len"] = case.q_lens
    run = jax.jit(partial(mla_decode, implementation=implementation, **inputs.static))

    @jax.jit
    def layers(plan, q, *args, **arrays):
        decode = partial(mla_decode, implementation=implementation, plan=plan, **inputs.static)
        return jax.lax.scan(lambda carry, _: (carry, decode(q, *args, **arrays)), 0, length=2)[1]

    with served_or_refused(OPERATION, implementation, case.q_dtype, case.cache_dtype, case.heads, case.page_size):
        plan = plan_decode(jnp.asarray(inputs.kv_lens), implementation=implementation, **options)
        own, planned = run(*inputs.args, **inputs.arrays), run(*inputs.args, **inputs.arrays, plan=plan)
        scanned = layers(plan, *inputs.args, **inputs.arrays)
        assert_same_bits(own, planned)
        assert_same_bits(own, [x[1] for x in scanned])


def test_plan_is_a_pytree(implementation):
    plan = make_plan(implementation, [100, 0])
    leaves, structure = jax.tree.flatten(plan)
    assert len(leaves) == 3 and all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert jax.tree.unflatten(structure, leaves).target == plan.target == implementation.partition(":")[0]


@native_only
def test_rows_without_keys_cost_nothing(implementation):
    plan = make_plan(implementation, [0, 1000, -1, 0])
    used = int(plan.part_offsets[-1])
    assert set(np.asarray(plan.items)[:used, 0].tolist()) == {1}


def assert_refused(plan, message, implementation):
    inputs = cases.make(cases.DecodeCase("", (100, 5)))
    with pytest.raises(ValueError, match=message):
        mla_decode(*inputs.args, plan=plan, implementation=implementation, **inputs.static)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lengths": [100, 5, 3]}, "plan was made for 3 sequences"),
        ({"dtype": "float16", "q_dtype": "float16"}, "over a float16 cache"),
    ],
    ids=["batch", "dtype"],
)
def test_plan_of_another_batch_or_dtype_is_refused(change, message, implementation):
    """A plan made for another batch or dtype is refused while tracing."""
    assert_refused(make_plan(implementation, **({"lengths": [100, 5]} | change)), message, implementation)


@native_only  # XLA needs no split, so nothing there depends on them
@pytest.mark.parametrize("change", [{"num_heads": 12}, {"q_len": 2}], ids=["heads", "q_len"])
def test_plan_of_other_tiles_is_refused(change, implementation):
    """So is one made for another head count or query length."""
    assert_refused(make_plan(implementation, [100, 5], **change), "plan was made for", implementation)


def test_plan_of_another_target_is_refused():
    """A plan made for one platform serves no call on another."""
    plan = dataclasses.replace(make_plan("xla", [100, 5]), target="rocm")
    inputs = cases.make(cases.DecodeCase("", (100, 5)))
    with pytest.raises(ValueError, match="plan was made for rocm"):
        mla_decode(*inputs.args, plan=plan, **inputs.static)


@native_only
def test_an_invariant_plan_is_needed_where_invariance_is_asked_for(implementation):
    inputs = cases.make(cases.DecodeCase("", (100, 5)))
    run = partial(mla_decode, *inputs.args, implementation=implementation, **inputs.static)
    with pytest.raises(ValueError, match="plan was made for"):
        run(plan=make_plan(implementation, [100, 5]), batch_invariant=True)
    invariant = make_plan(implementation, [100, 5], batch_invariant=True)
    for options in ({"batch_invariant": True}, {}):
        truth = oracle.decode(*inputs.args, **inputs.static)
        oracle.assert_attention(run(plan=invariant, **options), truth, 1e-2)


def test_capacity_follows_from_shapes():
    """The largest plan that any lengths give stays within max_items and max_partials."""
    heads = HeadSpecification(64, 64, 1, 32, 5)
    worst_items = worst_partials = 0
    rng = np.random.default_rng(3)
    run = compiled("xla", heads, 0, 1)
    for _ in range(40):
        lengths = rng.integers(0, 3000, 3).astype(np.int32)
        _, offsets, splits = map(np.asarray, run(lengths, None))
        worst_items = max(worst_items, int(offsets[-1]))
        worst_partials = max(worst_partials, int(splits[splits[:, 1] >= 2, 1].sum()))
    assert worst_items <= heads.max_items(3) == 6 + 5
    assert worst_partials <= heads.max_partials(3) == 10


def test_xla_plan_is_empty():
    """XLA needs no work split: its plan is empty, and any call of the same batch and cache takes it."""
    plan = jax_mla.plan_decode(
        jnp.array([5, 6]), num_heads=24, cache=jax.ShapeDtypeStruct((3, 64, 576), "bfloat16"), implementation="xla"
    )
    assert plan.items.shape == (0, 8) and plan.target == "xla"
