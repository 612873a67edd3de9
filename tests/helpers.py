"""What several test files share: comparing bits, and asking whether an implementation has a kernel."""

import contextlib

import jax
import numpy as np
import pytest

import jax_mla

native_only = pytest.mark.leave_out("xla*")


def bits(x):
    return np.asarray(x).view(np.uint8)


def assert_same_bits(a, b):
    """Of two tuples of arrays."""
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(bits(x), bits(y))


def assert_same_fp8(got, want):
    """The same bytes, the sign of a NaN aside."""
    nan = np.isnan(np.asarray(want).astype(np.float32))
    np.testing.assert_array_equal(np.isnan(np.asarray(got).astype(np.float32)), nan)
    np.testing.assert_array_equal(bits(got)[~nan], bits(want)[~nan])


def on_gpu():
    """Whether the test at hand runs on a GPU (the implementation fixture chose the device)."""
    return jax.config.jax_default_device.platform == "gpu"


def served(operation, implementation, q_dtype, cache_dtype, heads=24, page_size=64):
    """Whether a named implementation serves such a call; XLA serves every one."""
    if implementation == "xla":
        return True
    choice = jax_mla.explain(
        operation,
        num_heads=heads,
        q_dtype=q_dtype,
        cache_dtype=cache_dtype,
        page_size=page_size,
        implementation=implementation,
        target=implementation.partition(":")[0],
    )
    return choice.row is not None


def served_or_refused(operation, implementation, q_dtype, cache_dtype, heads=24, page_size=64):
    """A context for such calls: it asserts that they raise where the implementation has no kernel."""
    if served(operation, implementation, q_dtype, cache_dtype, heads, page_size):
        return contextlib.nullcontext()
    return pytest.raises(NotImplementedError, match=f"cannot serve this call of {operation}")
