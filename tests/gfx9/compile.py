"""Compiles sources for the emulated architectures, and the emulator's own core; what was compiled once is kept."""

import hashlib
import os
import pathlib
import subprocess
import tempfile

from .tools import tool

ROOT = pathlib.Path(__file__).parents[2]
HIP_FLAGS = ["-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib", "-std=c++17", "-O3"]


def cache_directory() -> pathlib.Path:
    """Where compiled files are kept: JAX_MLA_TEST_CACHE, or a folder for temporary files."""
    path = pathlib.Path(os.environ.get("JAX_MLA_TEST_CACHE", f"{tempfile.gettempdir()}/jax_mla_gfx9_{os.getuid()}"))
    path.mkdir(parents=True, exist_ok=True)
    return path


def run_compiler(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def cached(suffix: str, key: list[str | bytes], make) -> pathlib.Path:
    """The file that `make(path)` writes for this key; made once, and moved in place whole."""
    digest = hashlib.sha256()
    for part in key:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    path = cache_directory() / (digest.hexdigest()[:32] + suffix)
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            made = pathlib.Path(directory) / path.name
            make(made)
            os.replace(made, path)
    return path


def _compile(flags: list[str], text: str, suffix: str) -> bytes:
    clang = tool("clang")

    def make(path: pathlib.Path) -> None:
        source = path.with_suffix(suffix)
        source.write_text(text)
        run_compiler([clang, *flags, str(source), "-o", str(path)])

    return cached(".co", [clang, *flags, text], make).read_bytes()


def _preprocessed(source: pathlib.Path, flags: list[str]) -> str:
    """The source with all that it includes, so that a change in a header is a new key."""
    command = [tool("clang"), *flags, "-E", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def compile_hip(source: str | pathlib.Path, architecture: str, flags: tuple[str, ...] = ()) -> bytes:
    """The code object of a HIP file (a path) or of HIP text (a string); `flags` are added."""
    command = [*HIP_FLAGS, f"--offload-arch={architecture}", f"-I{ROOT}", *flags]
    if isinstance(source, pathlib.Path):
        clang = tool("clang")
        text = _preprocessed(source, command)
        return cached(
            ".co",
            [clang, *command, text],
            lambda path: run_compiler([clang, *command, str(source), "-o", str(path)]),
        ).read_bytes()
    return _compile(command, source, ".hip")


_KERNEL = """
.amdgcn_target "amdgcn-amd-amdhsa--{architecture}"
.text
.globl {name}
.p2align 8
.type {name},@function
{name}:
{body}
  s_endpgm
.rodata
.p2align 6
.amdhsa_kernel {name}
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_next_free_vgpr {total}
  .amdhsa_next_free_sgpr 96
  .amdhsa_accum_offset {vgprs}
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_float_denorm_mode_32 3
  .amdhsa_kernarg_size {kernarg}
.end_amdhsa_kernel
.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.target: amdgcn-amd-amdhsa--{architecture}
amdhsa.kernels:
  - .name: {name}
    .symbol: {name}.kd
    .kernarg_segment_size: {kernarg}
    .kernarg_segment_align: 8
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: 0
    .wavefront_size: 64
    .sgpr_count: 96
    .vgpr_count: {total}
    .agpr_count: 64
    .sgpr_spill_count: 0
    .vgpr_spill_count: 0
    .max_flat_workgroup_size: 1024
    .args: []
...
.end_amdgpu_metadata
"""


def compile_assembly(
    body: str, architecture: str, *, name: str = "kernel", lds: int = 0, kernarg: int = 64, vgprs: int = 64
) -> bytes:
    """The code object of one kernel with these instructions.

    It begins with the address of its arguments in s[0:1], the workgroup's index in s2, the thread's in v0, and may use
    `vgprs` vector registers, a0 to a63 and s0 to s95.
    """
    sizes = {"lds": lds, "kernarg": kernarg, "vgprs": vgprs, "total": vgprs + 64}
    text = _KERNEL.format(architecture=architecture, name=name, body=body, **sizes)
    return _compile(["-x", "assembler", "-target", "amdgcn-amd-amdhsa", f"-mcpu={architecture}"], text, ".s")
