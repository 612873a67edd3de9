"""What a launch hands to a kernel: ids, sizes, arguments, dynamic LDS; and what it tells of the run."""

import struct

import numpy as np
import pytest
from gfx9 import Memory, Program, compile_hip, marks

pytestmark = [marks.needs_llvm, marks.both_architectures]
SOURCE = """
#define KERNEL extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, 256)))
struct Params { int* out; short a; long b; float c[3]; };

KERNEL void ids(int* out) {
  int tx = __builtin_amdgcn_workitem_id_x(), ty = __builtin_amdgcn_workitem_id_y();
  int gx = __builtin_amdgcn_workgroup_id_x(), gy = __builtin_amdgcn_workgroup_id_y();
  int tz = __builtin_amdgcn_workitem_id_z(), gz = __builtin_amdgcn_workgroup_id_z();
  int nx = __builtin_amdgcn_workgroup_size_x(), ny = __builtin_amdgcn_workgroup_size_y();
  int nz = __builtin_amdgcn_workgroup_size_z();
  int index = ((gz * 3 + gy) * 2 + gx) * (nx * ny * nz) + (tz * ny + ty) * nx + tx;
  out[index] = gz << 24 | gy << 20 | gx << 16 | tz << 12 | ty << 8 | tx;
}

KERNEL void arguments(Params p, int last) {
  int i = __builtin_amdgcn_workitem_id_x();
  p.out[i] = p.a + (int)p.b * 10 + (int)(p.c[0] + p.c[1] + p.c[2]) * 100 + last * 1000 + i;
}

// Each thread passes its number on to the one that is `distance` further, through LDS that the launch gives.
KERNEL void rotate(int* out, int distance) {
  extern __attribute__((shared)) int numbers[];
  int i = __builtin_amdgcn_workitem_id_x();
  numbers[i] = i;
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  out[i] = numbers[(i + distance) % 192];
}
"""


def load(architecture):
    return Program(compile_hip(SOURCE, architecture, ("-mcode-object-version=5",)), architecture)


def test_ids_and_sizes(architecture):
    """A workgroup of 5 x 4 x 3 threads, the last wave not full, in a grid of 2 x 3 x 4."""
    memory, out = Memory(), np.full((4, 3, 2, 3, 4, 5), -1, np.int32)
    target = memory.allocate(out)
    load(architecture).launch("ids", (2, 3, 4), (5, 4, 3), struct.pack("<Q", target), memory=memory)
    gz, gy, gx, tz, ty, tx = np.indices(out.shape)
    expected = gz << 24 | gy << 20 | gx << 16 | tz << 12 | ty << 8 | tx
    np.testing.assert_array_equal(memory.read(target, out), expected)


def test_arguments_lie_as_the_compiler_has_them(architecture):
    memory, out = Memory(), np.full(70, -1, np.int32)
    target = memory.allocate(out)
    kernarg = struct.pack("<Qhxxxxxxqfff4xi", target, 7, 5, 1.0, 2.0, 3.0, 4)
    load(architecture).launch("arguments", (1, 1, 1), (70, 1, 1), kernarg, memory=memory)
    np.testing.assert_array_equal(memory.read(target, out), 4657 + np.arange(70))


@pytest.mark.parametrize("order", ["forward", "backward", "interleaved"])
def test_dynamic_lds(architecture, order):
    memory, out, program = Memory(), np.full(192, -1, np.int32), load(architecture)
    target = memory.allocate(out)
    arguments = struct.pack("<Qi", target, 70)
    done = program.launch("rotate", (1, 1, 1), (192, 1, 1), arguments, memory=memory, dynamic_lds=192 * 4, order=order)
    np.testing.assert_array_equal(memory.read(target, out), (np.arange(192) + 70) % 192)
    assert (done.lds_written, done.lds_read, done.global_written) == (768, 768, 768)
    assert done.instructions == done.counts.sum() > 3 * 10
    names = [line.text.partition(" ")[0] for line in program.lines]
    assert sum(int(n) for name, n in zip(names, done.counts, strict=True) if name == "s_barrier") == 3
