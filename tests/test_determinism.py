"""Same inputs, same bits; and with batch_invariant, a row's bits whatever its batch."""

import dataclasses
from functools import partial

import cases
import jax
import numpy as np
import pytest
from helpers import assert_same_bits, served_or_refused

from jax_mla import mla_decode

OPERATION = "mla_decode"
# On a GPU XLA promises no such thing: it picks its matrix products by shape.
can_be_batch_invariant = pytest.mark.leave_out("xla-gpu")


@pytest.mark.parametrize("name", ["kimi_k3_on_4", "long_and_short", "ragged", "fp8_queries"])
def test_same_bits_each_time(name, implementation):
    """Splits and reductions have a fixed order; so do fresh copies of the operands, at other addresses."""
    case = cases.BY_NAME[name]
    inputs = cases.make(case)
    run = jax.jit(partial(mla_decode, implementation=implementation, **inputs.static))
    with served_or_refused(OPERATION, implementation, case.q_dtype, case.cache_dtype, case.heads, case.page_size):
        first = run(*inputs.args, **inputs.arrays)
        for _ in range(8):
            assert_same_bits(first, run(*(np.copy(x) for x in inputs.args), **inputs.arrays))


@can_be_batch_invariant
@pytest.mark.parametrize("heads, q_len", [(24, 1), (31, 2)])
def test_batch_invariant_rows(heads, q_len, implementation):
    """A row has the same bits alone, beside others, and in another place of another batch."""
    case = cases.DecodeCase("", (5000, 300, 64, 2049, 1), heads=heads, q_lens=q_len)
    inputs = cases.make(case)
    run = jax.jit(partial(mla_decode, implementation=implementation, batch_invariant=True, **inputs.static))
    everything = run(*inputs.args)
    for rows in ([0], [2, 0], [3, 3, 1, 0, 4, 2, 0, 0], [1, 0]):
        q, table, lens = inputs.q[rows], inputs.page_table[rows], inputs.kv_lens[rows]
        assert_same_bits(run(q, inputs.cache, table, lens), [np.asarray(x)[rows] for x in everything])


@can_be_batch_invariant
def test_batch_invariant_in_ragged_batches(implementation):
    """The same where a request has other neighbours in a ragged batch."""
    inputs = cases.make(cases.DecodeCase("", (4000, 300, 64), q_lens=(3, 1, 2)))
    run = jax.jit(partial(mla_decode, implementation=implementation, batch_invariant=True, **inputs.static))
    whole = run(*inputs.args, **inputs.arrays)
    only = dataclasses.replace(inputs, page_table=inputs.page_table[:1], kv_lens=inputs.kv_lens[:1], q=inputs.q[:3])
    part = run(*only.args, cu_q_lens=np.array([0, 3], np.int32))
    assert_same_bits(part, [np.asarray(x)[:3] for x in whole])
