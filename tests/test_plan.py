"""The work split of decode: planners on every device against the loop, its bounds, and the DecodePlan that holds it."""

import dataclasses
import itertools
from functools import partial

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import assert_same_bits, native_only, served_or_refused

import jax_mla
from jax_mla import _ffi, dispatch, mla_decode, plan_decode, reference
from jax_mla.dispatch import PlannerTuning
from jax_mla.heads import HeadSpecification

OPERATION = "mla_decode"
LENGTHS = (0, -3, -(2**31), 1, 2, 63, 64, 65, 500, 2000, 2049, 5000, 30000)


def compiled(implementation, heads, tuning):
    """A planner as (kv_lens, cu_q_lens) -> items, part_offsets, tile_splits."""
    costs = dataclasses.asdict(tuning)
    if implementation != "xla":
        return jax.jit(partial(_ffi.plan_decode, heads=heads, **costs))
    fields = {name: getattr(heads, name) for name in ("max_q_len", "tile_rows", "parts", "batch_invariant")}
    return jax.jit(partial(reference.plan_decode, num_heads=heads.padded_heads, **fields, **costs))


SHAPES = (  # batch, heads, max_q_len, tile_rows, parts, PlannerTuning
    (1, 24, 1, 32, 8, (1, 8, 0, 3)),
    (7, 24, 1, 32, 8, (1, 8, 400, 3)),
    (6, 128, 1, 64, 132, (5, 2, 600, 5)),
    (3, 1, 1, 16, 264, (5, 2, 150, 16)),
    (5, 17, 4, 16, 13, (0, 1, 0, 0)),
    (4, 96, 3, 256, 2, (1, 8, 0, 3)),
    (600, 24, 1, 32, 132, (1, 2, 64, 16)),
    (60, 128, 1, 48, 132, (1, 2, 8, 16)),
    (40, 128, 2, 48, 31, (1, 2, 0, 16)),
)


@pytest.mark.leave_out("*:*")  # one planner for all variants
@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "ragged"])
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["balanced", "invariant"])
def test_planners_agree_with_the_loop(batch_invariant, ragged, implementation):
    """Every planner writes the same plan, bit for bit, unused items included, and it fits into the arrays."""
    rng = np.random.default_rng(0)
    for batch, num_heads, max_q_len, tile_rows, parts, tuning in SHAPES:
        heads = HeadSpecification(num_heads, num_heads, max_q_len, tile_rows, parts, batch_invariant)
        run = compiled(implementation, heads, PlannerTuning(*tuning))
        for trial in range(2 if batch > 100 else 5):
            lengths = rng.choice(LENGTHS, batch).astype(np.int32)
            if trial == 1:
                lengths[lengths > 0] = 3000
            if trial == 2:
                lengths[:] = rng.integers(4000, 9000)
            if trial == 3:
                lengths[:] = 0
            cu = None
            if ragged:
                q_lens = np.full(batch, max_q_len) if trial == 2 else rng.integers(0, max_q_len + 2, batch)
                cu = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
            items, offsets, splits = map(np.asarray, run(lengths, cu))
            want_items, want_offsets, want_splits = oracle.plan(
                lengths,
                cu,
                heads=num_heads,
                max_q_len=max_q_len,
                tile_rows=tile_rows,
                parts=parts,
                batch_invariant=batch_invariant,
                **dataclasses.asdict(PlannerTuning(*tuning)),
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
        run = compiled(implementation, heads, dispatch.PLANNER_TUNING["cpu"])
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
    run = compiled(implementation, heads, dispatch.PLANNER_TUNING["cpu"])
    rng = np.random.default_rng(2)
    pieces = {}
    for _ in range(12):
        lengths = rng.choice([1, 64, 2048, 2049, 5000, 40000, 100000], 6).astype(np.int32)
        items, offsets, _ = map(np.asarray, run(lengths, None))
        for request, length in enumerate(lengths):
            own = [tuple(item[2:4]) for item in items[: offsets[-1]] if item[0] == request]
            assert pieces.setdefault(int(length), own) == own


def parts_of(implementation, lengths, heads=24, tile_rows=24, parts=132, **options):
    """The items (request, row tile, first block, end block, partial) of each part of a plan with a GPU's tuning."""
    specification = HeadSpecification(heads, heads, 1, tile_rows, parts, **options)
    run = compiled(implementation, specification, dispatch.PLANNER_TUNING["cuda"])
    items, offsets, _ = map(np.asarray, run(np.asarray(lengths, np.int32), None))
    blocks = np.stack([items[:, 0], items[:, 1], items[:, 2] // 64, -(-items[:, 3] // 64), items[:, 4]], axis=-1)
    return [blocks[first:last].tolist() for first, last in itertools.pairwise(offsets)]


@pytest.mark.leave_out("*:*")
@pytest.mark.parametrize(
    "batch, length, parts_used, blocks",
    [
        (128, 4096, 128, [64]),  # as many requests as parts, nearly: none is cut
        (132, 4096, 132, [64]),
        (256, 4096, 128, [64, 64]),  # two each
        (1024, 4096, 128, [64] * 8),
        (16, 100000, 128, [196]),  # eight pieces each
        (8, 4096, 128, [4]),
        (1, 8192, 64, [2]),
        (1, 4096, 64, [1]),  # few blocks in all: single ones
        (1, 4097, 33, [2]),
        (1, 512, 8, [1]),
        (8, 512, 64, [1]),
        (1, 128, 1, [2]),  # no longer than a part is otherwise: whole
        (1, 131072, 128, [16]),
    ],
)
def test_equal_requests(batch, length, parts_used, blocks, implementation):
    """Equal requests are cut only where that fills parts, and then into equal pieces."""
    used = [part for part in parts_of(implementation, [length] * batch) if part]
    assert len(used) == parts_used
    assert [end - begin for _, _, begin, end, _ in used[0]] == blocks
    assert all((partial >= 0) == (blocks[0] * 64 < length) for part in used for *_, partial in part)


@pytest.mark.leave_out("*:*")
def test_uneven_requests(implementation):
    """No part has more than its share and what saves cuts; a cut more than parts is never needed."""
    rng = np.random.default_rng(4)
    batches = [np.maximum(rng.normal(4096, spread, n), 1) for spread in (50, 2000) for n in (20, 100, 128, 140, 500)]
    for lengths in (*batches, [100000] + [1000] * 127, [1000] * 64 + [100000] + [1000] * 64):
        parts = parts_of(implementation, lengths)
        loads = [sum(end - begin for _, _, begin, end, _ in part) for part in parts]
        total = int(np.sum(-(-np.asarray(lengths, int) // 64)))
        assert sum(loads) == total
        share = -(-(total + len(lengths)) // 132)
        assert max(loads) <= share * 5 / 4 + 24 // 9
        assert sum(map(len, parts)) <= len(lengths) + 131


@pytest.mark.leave_out("*:*")
@pytest.mark.parametrize("batch", [3, 40, 128])
def test_tiles_of_a_request_run_side_by_side(batch, implementation):
    """Parts of a group walk the same keys in the same order, each for a tile of its own, so that L2 serves the rest."""
    parts = parts_of(implementation, np.random.default_rng(5).integers(1, 9000, batch), heads=128, tile_rows=48)
    walks = [[(tile, (request, begin, end)) for request, tile, begin, end, _ in part] for part in parts]
    for first in range(0, 132, 3):
        group = walks[first : first + 3]
        assert all(tile == place for place, walk in enumerate(group) for tile, _ in walk)
        assert [keys for _, keys in group[0]] == [keys for _, keys in group[1]] == [keys for _, keys in group[2]]


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
    run = compiled("xla", heads, PlannerTuning(0, 1, 0, 3))
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
