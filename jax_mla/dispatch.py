"""Which implementation serves a call, decided by data: one capability row for each thing that a native module can do.

The choice is made for each platform that a program may be lowered for, so that a CPU host can export for a GPU.
`implementation=None` takes the best that can serve the call; a named one serves it or raises.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jax_mla import _ffi
from jax_mla.heads import NO_HEADS, HeadCounts, HeadSpecification, padded_count

XLA = "xla"


@dataclasses.dataclass(frozen=True)
class Capability:
    """One thing that a native module does.

    operation: the public function. platform: "cpu", "cuda" or "rocm". variant: its kernels, as in "cuda:generic".
    architecture: "x86_64", "sm_90", "sm_80+" (that and later), "gfx950". q_dtype, cache_dtype: names of dtypes (for
    cache updates and packing: of the input and of the result; for prefill: of queries and keys, and of values).
    planner_heads, reducer_heads: counts that each takes. tile_rows: (query, head) rows that a tile may have. max_q_len:
    query tokens a sequence, None = any. page_sizes: tokens a page, None = any. positive_scale: the scale of the scores
    has to be above 0. key_parts: prefill takes a key's nope and rope part apart too. largest_if_several: several tiles
    of a sequence have the most rows, and not as few as will do. by_name: chosen by its variant's name alone, as in
    implementation="cuda:sm90", since it has not passed its tests on hardware yet.
    """

    operation: str
    platform: str
    variant: str
    architecture: str
    q_dtype: str
    cache_dtype: str
    planner_heads: HeadCounts = NO_HEADS
    reducer_heads: HeadCounts = NO_HEADS
    tile_rows: tuple[int, ...] = ()
    max_q_len: int | None = None
    page_sizes: HeadCounts | None = None
    positive_scale: bool = False
    key_parts: bool = False
    largest_if_several: bool = False
    by_name: bool = False

    @property
    def implementation(self) -> str:
        return f"{self.platform}:{self.variant}"


@dataclasses.dataclass(frozen=True)
class Choice:
    """What serves a call on one platform, and why. `row` is None where that is XLA."""

    platform: str
    row: Capability | None
    heads: HeadSpecification | None
    variant: int
    reason: str

    @property
    def implementation(self) -> str:
        return self.row.implementation if self.row else XLA

    def __str__(self) -> str:
        return f"{self.platform}: {self.implementation}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class PlannerTuning:
    """How a platform's planner weighs work, in blocks of 64 tokens.

    overhead_blocks: the fixed cost of a tile. min_part_blocks: of the smallest part. few_pieces: where all tiles
    together have no more blocks than this, parts may have one, since the reduction then reads few pieces. slack: a
    part may have this much more than its share where that saves cuts, in 1/64 of the share.
    """

    overhead_blocks: int
    min_part_blocks: int
    few_pieces: int
    slack: int


# A GPU wants many small parts to fill its multiprocessors; a thread of a CPU is better off with long runs. A
# multiprocessor of a GPU that ends early leaves its bandwidth to the others: on an H200, 90 of 132 keep memory busy.
PLANNER_TUNING = {
    "cpu": PlannerTuning(1, 8, 0, 3),
    "cuda": PlannerTuning(4, 2, 64, 16),
    "rocm": PlannerTuning(1, 2, 0, 16),
}


@dataclasses.dataclass(frozen=True)
class SplitTuning:
    """When a platform cuts the chosen slots of a query token in mla_sparse_decode: where tokens alone are too few.

    units: pieces of work that are enough; None: as many as the plan of decode has parts. min_indices: of a piece.
    """

    units: int | None
    min_indices: int


# On the CPU a constant, so that the bits of a result do not depend on the number of threads.
SPLIT_TUNING = {"cpu": SplitTuning(64, 256), "cuda": SplitTuning(None, 128), "rocm": SplitTuning(None, 128)}

# Multiprocessors assumed where a program is lowered for a GPU on a machine without one: those of an H100 or H200,
# and the compute units of an MI300X.
DEFAULT_UNITS = {"cuda": 132, "rocm": 304}


@functools.cache
def _compiled_table() -> tuple[Capability, ...]:
    def row(platform: str, fields: dict[str, Any]) -> Capability:
        return Capability(
            platform=platform,
            **fields
            | {
                "planner_heads": HeadCounts(tuple(fields["planner_heads"])),
                "reducer_heads": HeadCounts(tuple(fields["reducer_heads"])),
                "tile_rows": tuple(fields["tile_rows"]),
                "max_q_len": fields["max_q_len"] or None,
                "page_sizes": HeadCounts(tuple(fields["page_sizes"])) if fields["page_sizes"] else None,
            },
        )

    return tuple(row(p, fields) for p, module in _ffi.MODULES.items() for fields in module.capabilities())


_override: contextvars.ContextVar[tuple[Capability, ...] | None] = contextvars.ContextVar("table", default=None)


@contextlib.contextmanager
def override_capabilities(rows: Iterable[Capability]) -> Iterator[None]:
    """Within this context, dispatch sees these rows and no others: to force padding and fallbacks in tests."""
    token = _override.set(tuple(rows))
    try:
        yield
    finally:
        _override.reset(token)


def capabilities(target: str | None = None) -> tuple[Capability, ...]:
    """The table of what runs natively, the best rows first.

    target: None for all built modules; a platform ("cpu", "cuda", "rocm"), an architecture ("sm_90", "gfx950") or a
    variant by name ("cpu:avx2") for its rows alone. ValueError for any other name.
    """
    table = _override.get()
    rows = _compiled_table() if table is None else table
    if target is None or target in _ffi.PLATFORMS:
        return tuple(row for row in rows if target in (None, row.platform))
    if ":" in target:
        return tuple(row for row in rows if row.implementation == target)
    if not re.fullmatch(r"sm_\d+|gfx\w+|x86_64|aarch64", target):
        raise ValueError(
            f"target is {target!r}; expected one of {', '.join(_ffi.PLATFORMS)}, 'sm_NN', 'gfxNNN' or PLATFORM:VARIANT"
        )
    return tuple(row for row in rows if serves_architecture(row.architecture, target))


def serves_architecture(supported: str, actual: str | None) -> bool:
    """Whether a row for `supported` ("sm_80+": that and later) runs on `actual`; None, unknown, is let through."""
    if actual is None or supported == actual:
        return True
    later, number = re.fullmatch(r"sm_(\d+)\+", supported), re.fullmatch(r"sm_(\d+)", actual)
    return bool(later and number and int(number[1]) >= int(later[1]))


@functools.cache
def _default_device() -> tuple[str, Any]:
    """Our name of the default backend's platform, and its first device."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return device.platform, device
    return ("rocm" if "rocm" in device.client.platform_version.lower() else "cuda"), device


def default_platform() -> str:
    """Our name of the default backend's platform: "cpu", "cuda" or "rocm"."""
    return _default_device()[0]


def device_architecture(platform: str) -> str | None:
    """The architecture of the default device if it is of this platform, as in "sm_90"; else None."""
    default, device = _default_device()
    if default != platform:
        return None
    capability = getattr(device, "compute_capability", None)
    if platform == "cuda" and capability:
        return "sm_" + str(capability).replace(".", "")
    return str(capability) if platform == "rocm" and capability else None


def _units(platform: str) -> int:
    """Multiprocessors of the GPU, or threads of the CPU, that a plan spreads work over."""
    if platform == "cpu":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    default, device = _default_device()
    count = getattr(device, "core_count", None) if default == platform else None
    return count or DEFAULT_UNITS[platform]


def parts(platform: str) -> int:
    """Parts that the planner cuts a batch into on this platform."""
    module = _ffi.MODULES.get(platform)
    return _units(platform) * (module.parts_per_unit() if module else 1)


def _parse(implementation: str | None) -> tuple[str | None, str | None]:
    """ "cuda:generic" -> ("cuda", "generic"); ValueError for an unknown name."""
    if implementation is None or implementation == XLA:
        return implementation, None
    platform, _, variant = implementation.partition(":")
    if platform not in _ffi.PLATFORMS:
        names = ", ".join((*_ffi.PLATFORMS, XLA))
        raise ValueError(f"implementation is {implementation!r}; expected None, {names}, or a variant as in 'cpu:avx2'")
    return platform, variant or None


def _choose(
    platform: str,
    variant: str | None,
    operation: str,
    q_dtype: str,
    cache_dtype: str,
    num_heads: int | None,
    max_q_len: int,
    page_size: int | None,
    batch_invariant: bool,
    architecture: str | None,
    scale: float | None,
) -> Choice:
    def refuse(reason: str) -> Choice:
        return Choice(platform, None, None, 0, reason)

    rows = [row for row in capabilities(platform) if row.operation == operation]
    if not rows:
        built = platform in _ffi.MODULES
        return refuse(f"no {platform} kernel for {operation}" if built else f"the {platform} module is not built")
    if variant is not None:
        known = [row.variant for row in rows]
        rows = [row for row in rows if row.variant == variant]
        if not rows:
            return refuse(
                f"no variant {variant!r} for {operation} on this machine; there are {', '.join(dict.fromkeys(known))}"
            )
    rows = [row for row in rows if serves_architecture(row.architecture, architecture)]
    if not rows:
        return refuse(f"no {platform} kernel for {operation} on {architecture}")
    rows = [row for row in rows if row.q_dtype == q_dtype and row.cache_dtype == cache_dtype]
    if not rows:
        return refuse(
            f"no {platform} kernel for {operation} from {q_dtype} to {cache_dtype}"
            if num_heads is None
            else f"no {platform} kernel for {operation} with q {q_dtype} over a {cache_dtype} cache"
        )
    rows = [row for row in rows if row.max_q_len is None or max_q_len <= row.max_q_len]
    if not rows:
        return refuse(f"no {platform} kernel for {operation} takes {max_q_len} query tokens a sequence")
    rows = [row for row in rows if None in (row.page_sizes, page_size) or page_size in row.page_sizes]
    if not rows:
        return refuse(f"no {platform} kernel for {operation} takes pages of {page_size} tokens")
    rows = [row for row in rows if scale is None or scale > 0 or not row.positive_scale]
    if not rows:
        return refuse(f"no {platform} kernel for {operation} takes scale {scale}")
    if variant is None and all(row.by_name for row in rows):
        return refuse(f"{platform}:{rows[0].variant} has not passed its tests on hardware and is chosen by name alone")
    rows = [row for row in rows if variant is not None or not row.by_name]
    number = _ffi.variant_number(platform, variant)
    if num_heads is None:
        return Choice(platform, rows[0], None, number, f"{rows[0].architecture}, {q_dtype} to {cache_dtype}")
    for row in rows:
        padded = padded_count(num_heads, row.planner_heads, row.reducer_heads)
        if padded is not None:
            # As few tiles as the largest allows, and for these the smallest, or the largest.
            rows_needed = max_q_len * padded
            largest = row.tile_rows[-1]
            tiles = -(-rows_needed // largest)
            tile_rows = next(n for n in row.tile_rows if n * tiles >= rows_needed)
            if tiles > 1 and row.largest_if_several:
                tile_rows = largest
            heads = HeadSpecification(num_heads, padded, max_q_len, tile_rows, parts(platform), batch_invariant)
            how = f"{num_heads} heads native" if padded == num_heads else f"{num_heads} heads padded to {padded}"
            return Choice(platform, row, heads, number, f"{row.architecture}, q {q_dtype}, cache {cache_dtype}, {how}")
    return refuse(f"planner and reducer share no head count from {num_heads} on")


def select(
    operation: str,
    *,
    implementation: str | None,
    q_dtype: Any,
    cache_dtype: Any,
    num_heads: int | None = None,
    max_q_len: int = 1,
    page_size: int | None = None,
    batch_invariant: bool = False,
    scale: float | None = None,
) -> tuple[Choice, ...]:
    """One choice for each platform to be served natively: none for "xla", that one for a name, all that can for None.

    Raises NotImplementedError where a named implementation cannot serve the call, ValueError for an unknown name.
    """
    platform, variant = _parse(implementation)
    if platform == XLA:
        return ()
    choices = tuple(
        _choose(
            p,
            variant,
            operation,
            str(q_dtype),
            str(cache_dtype),
            num_heads,
            max_q_len,
            page_size,
            batch_invariant,
            device_architecture(p),
            scale,
        )
        for p in ([platform] if platform else _ffi.PLATFORMS)
    )
    if platform and choices[0].row is None:
        raise NotImplementedError(
            f"implementation={implementation!r} cannot serve this call of {operation}: {choices[0].reason}"
        )
    for choice in choices:
        if choice.row is None and choice.platform == _default_device()[0] != "cpu":
            _warn_once(operation, choice.reason)
    return tuple(choice for choice in choices if choice.row is not None)


@functools.cache
def _warn_once(operation: str, reason: str) -> None:
    warnings.warn(
        f"{operation} runs through XLA on this GPU, several times slower than a kernel: {reason}", stacklevel=4
    )


def run(
    choices: tuple[Choice, ...], named: bool, native: Callable[..., Any], xla: Callable[..., Any], *operands: Any
) -> Any:
    """native(choice, *operands) on each chosen platform, xla(*operands) on all others unless one was `named`."""
    branches = {choice.platform: functools.partial(native, choice) for choice in choices}
    if not branches:
        return xla(*operands)
    if named:
        return jax.lax.platform_dependent(*operands, **branches)
    return jax.lax.platform_dependent(*operands, default=xla, **branches)


def spread(x: jax.Array, size: int, batched: bool) -> jax.Array:
    """Of a vmap's `size` calls each one's own x; the same for all where it is not mapped."""
    return x if batched else jnp.broadcast_to(x, (size, *x.shape))


def without_derivative(operation: str, instead: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """function, which says that it serves inference, and what has a derivative, where it is differentiated."""
    wrapped = jax.custom_jvp(function)

    @wrapped.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(f"{operation} has no derivative: it serves inference. {instead}")

    return wrapped


def run_decode(
    operation: str,
    choices: tuple[Choice, ...],
    named: bool,
    native: Callable[..., Any],
    xla: Callable[..., Any],
    fold: Callable[..., tuple[jax.Array, jax.Array]],
    *operands: Any,
) -> Any:
    """`run` of a decode's (out, lse), with the rules that decodes share.

    vmap: fold(size, in_batched, operands) computes all calls at once, their axis first. No derivative.
    """

    @jax.custom_batching.custom_vmap
    def batched(*operands):
        return run(choices, named, native, xla, *operands)

    @batched.def_vmap
    def rule(axis_size, in_batched, *operands):
        return fold(axis_size, in_batched, operands), (True, True)

    instead = "To train, attend to up-projected keys and values"
    return without_derivative(operation, instead, batched)(*operands)


def explain(
    operation: str = "mla_decode",
    *,
    num_heads: int | None = 24,
    q_dtype: Any = jnp.bfloat16,
    cache_dtype: Any = None,
    q_len: int = 1,
    page_size: int = 64,
    implementation: str | None = None,
    target: str | None = None,
) -> Choice:
    """What would serve a call, and the row of the table that decides. Prints as one line.

    operation: a public function's name. num_heads: ignored by operations without a head count. q_dtype, cache_dtype:
    of queries and cache ("fp8_ds_mla" is one), of keys and values for mla_prefill, or of input and result for
    update_cache and the packing; cache_dtype defaults to q_dtype. q_len, page_size: query tokens a sequence and tokens
    a page, in decode. target: a platform or an architecture ("sm_90"); default: this process's. Raises ValueError for
    an unknown name.
    """
    platform, variant = _parse(implementation)
    architecture = target if target not in (None, *_ffi.PLATFORMS) else None
    if target is None:
        target = platform if platform not in (None, XLA) else _default_device()[0]
    if target not in _ffi.PLATFORMS:
        capabilities(target)  # refuses an unknown name
        target = "cuda" if target.startswith("sm_") else "rocm" if target.startswith("gfx") else "cpu"
    architecture = architecture or device_architecture(target)
    if platform == XLA:
        return Choice(target, None, None, 0, "asked for by name")
    if platform not in (None, target):
        return Choice(target, None, None, 0, f"implementation={implementation!r} is for another platform")
    names = [dtype if isinstance(dtype, str) else jnp.dtype(dtype).name for dtype in (q_dtype, cache_dtype or q_dtype)]
    heads = num_heads if operation in ("mla_decode", "mla_sparse_decode") else None
    return _choose(target, variant, operation, *names, heads, q_len, page_size, False, architecture, None)
