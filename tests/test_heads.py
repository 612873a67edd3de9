"""Head counts: what is native, what is padded and how, and that every size follows from the one specification."""

import contextlib
import dataclasses
from functools import partial

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import native_only

import jax_mla
from jax_mla import mla_decode, override_capabilities, plan_decode
from jax_mla.dispatch import select
from jax_mla.heads import HeadCounts, HeadSpecification, is_valid_count, padded_count

OPERATION = "mla_decode"
SIXTEENS = HeadCounts(((16, 128, 16), (144, 4096, 16)))


@contextlib.contextmanager
def table(implementation, planner, reducer):
    """The compiled-in table with other head counts, for the planner and for the reducer."""
    rows = jax_mla.capabilities(implementation.partition(":")[0])
    with override_capabilities(dataclasses.replace(r, planner_heads=planner, reducer_heads=reducer) for r in rows):
        yield


def choice(implementation, heads, q_len=1, **options):
    (found,) = select(
        OPERATION,
        implementation=implementation,
        q_dtype="bfloat16",
        cache_dtype="bfloat16",
        num_heads=heads,
        max_q_len=q_len,
        **options,
    )
    return found


def test_padding_repeats_or_tiles_and_undoes_itself():
    """A count that divides the padded one repeats each head; any other tiles them and cuts; both come back."""
    for heads, padded in ((24, 32), (17, 32), (8, 16), (1, 16), (12, 16), (16, 16), (31, 32), (4, 128), (96, 128)):
        specification = HeadSpecification(heads, padded, 1, 16, 4)
        x = jnp.arange(2 * heads * 3).reshape(2, heads, 3)
        wide = specification.pad(x)
        assert wide.shape == (2, padded, 3)
        order = np.arange(padded) // (padded // heads) if padded % heads == 0 else np.arange(padded) % heads
        np.testing.assert_array_equal(wide, np.asarray(x)[:, order])
        np.testing.assert_array_equal(specification.unpad(wide), x)
        np.testing.assert_array_equal(specification.unpad(wide[..., 0]), x[..., 0])
    same = HeadSpecification(24, 24, 1, 16, 4)
    assert same.pad(x) is x and same.unpad(x) is x


def test_padded_count_is_the_smallest_that_both_take():
    """Planner and reducer are asked apart: a count is native only when both have it."""
    with_24 = HeadCounts((*SIXTEENS.ranges, (24, 24, 1)))
    assert padded_count(24, with_24, with_24) == 24
    assert padded_count(24, SIXTEENS, with_24) == 32
    assert padded_count(24, with_24, SIXTEENS) == 32
    assert padded_count(17, with_24, with_24) == 24
    assert padded_count(128, SIXTEENS, SIXTEENS) == 128
    assert padded_count(129, HeadCounts.of(64), HeadCounts.of(64)) is None
    assert padded_count(4, HeadCounts.of(8, 16), HeadCounts.of(16, 32)) == 16
    assert padded_count(4, HeadCounts(()), SIXTEENS) is None


@native_only
@pytest.mark.parametrize("heads", [24, 17, 31, 1, 2, 4, 8, 12, 96, 128, 144])
def test_padded_and_native_agree(heads, implementation):
    """Every count, run as it is and padded to a multiple of 16, gives the truth. 24 -> 32 and back."""
    inputs = cases.make(cases.DecodeCase("", (130, 20), heads=heads, q_lens=2))
    run = partial(mla_decode, implementation=implementation, **inputs.static)
    native = run(*inputs.args)
    with table(implementation, SIXTEENS, SIXTEENS):
        padded_heads = -(-heads // 16) * 16
        assert choice(implementation, heads).heads.padded_heads == padded_heads
        padded = run(*inputs.args)
    truth = oracle.decode(*inputs.args, **inputs.static)
    oracle.assert_attention(native, truth, 1e-2)
    oracle.assert_attention(padded, truth, 1e-2)
    with table(implementation, SIXTEENS, SIXTEENS):
        oracle.assert_attention(run(cases.split(inputs.q), *inputs.args[1:]), truth, 1e-2)


@native_only
def test_planner_and_reducer_that_differ(implementation):
    """Of the field's failures: the reducer supports 24 heads, the planner does not: pads to 32 instead of refusing."""
    with_24 = HeadCounts((*SIXTEENS.ranges, (24, 24, 1)))
    inputs = cases.make(cases.DecodeCase("", (130, 20)))
    truth = oracle.decode(*inputs.args, **inputs.static)
    for planner, reducer, expected in (
        (SIXTEENS, with_24, 32),
        (with_24, SIXTEENS, 32),
        (with_24, with_24, 24),
        (HeadCounts.of(64), HeadCounts.of(32, 64), 64),
    ):
        with table(implementation, planner, reducer):
            assert choice(implementation, 24).heads.padded_heads == expected
            got = mla_decode(*inputs.args, implementation=implementation, **inputs.static)
        oracle.assert_attention(got, truth, 1e-2)


@native_only
def test_sizes_follow_the_padded_count(implementation):
    """Of the field's failures: a gate that checked the unpadded count, kernels that ran the padded one.

    The plan's arrays, the scratch and the launch are all those of the padded count.
    """
    cache = jax.ShapeDtypeStruct((4, 64, 576), jnp.bfloat16)
    lengths = jnp.array([1000, 10, 300])
    make = partial(plan_decode, lengths, cache=cache, q_len=3, implementation=implementation)
    with table(implementation, SIXTEENS, SIXTEENS):
        padded, aligned = make(num_heads=24), make(num_heads=32)
    assert padded.heads == dataclasses.replace(aligned.heads, num_heads=24)
    assert padded.heads.padded_heads == 32 and padded.heads.row_tiles * padded.heads.tile_rows >= 3 * 32
    for name in ("items", "part_offsets", "tile_splits"):
        np.testing.assert_array_equal(getattr(padded, name), getattr(aligned, name))
    assert padded.tile_splits.shape == (3 * padded.heads.row_tiles, 2)
    assert padded.items.shape == (padded.heads.max_items(3), 8)

    inputs = cases.make(cases.DecodeCase("", (130, 20), q_lens=3))
    with table(implementation, SIXTEENS, SIXTEENS):
        run = jax.jit(partial(mla_decode, implementation=implementation, **inputs.static))
        heads = choice(implementation, 24, 3).heads
        program = run.lower(*inputs.args).as_text()
    scratch = f"tensor<{heads.max_partials(2)}x{heads.tile_rows}x512xf32>"
    assert scratch in program and f"tensor<{2 * 3}x32x512xbf16>" in program


@native_only
def test_native_count_is_not_copied(implementation):
    """Where both take 24 heads, q reaches the kernel as it came: nothing in the compiled program pads or cuts it."""
    inputs = cases.make(cases.DecodeCase("", (130, 20)))

    def program():
        run = jax.jit(partial(mla_decode, implementation=implementation, **inputs.static))
        return run.lower(*inputs.args).compile().as_text()

    def copies(text):
        words = ("pad(", "concatenate(", "slice(", "gather(", "broadcast(", "copy(")
        return [line for line in text.splitlines() if any(w in line for w in words) and "bf16[2,24" in line]

    text = program()
    assert copies(text) == []
    with table(implementation, SIXTEENS, SIXTEENS):
        assert "bf16[2,32,576]" in program().replace(" ", "")
    assert "bf16[2,32" not in text


@pytest.mark.parametrize("heads", [129, 0, 130, 143, 200])
def test_other_counts_are_refused(heads):
    """129 is refused with a message, by the plan and by decode."""
    assert not is_valid_count(heads)
    q = jnp.zeros((1, 1, heads, 576), jnp.bfloat16)
    cache = jnp.zeros((2, 64, 576), jnp.bfloat16)
    lengths = jnp.ones(1, jnp.int32)
    with pytest.raises(NotImplementedError, match=f"q has {heads} heads; jax_mla takes 1 to 128"):
        mla_decode(q, cache, jnp.zeros((1, 1), jnp.int32), lengths, scale=1.0)
    with pytest.raises((NotImplementedError, ValueError), match="num_heads"):
        plan_decode(lengths, num_heads=heads, cache=cache)


def test_no_common_count_falls_back_to_xla():
    """Where planner and reducer share no count from H on, None runs through XLA, and a named kernel refuses."""
    inputs = cases.make(cases.DecodeCase("", (130, 20), heads=96))
    with table("cpu", HeadCounts.of(64), HeadCounts.of(64)):
        oracle.assert_attention(
            mla_decode(*inputs.args, **inputs.static), oracle.decode(*inputs.args, **inputs.static), 1e-2
        )
        with pytest.raises(NotImplementedError):
            mla_decode(*inputs.args, implementation="cpu", **inputs.static)
