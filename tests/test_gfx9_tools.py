"""Finding LLVM's tools, compiling, and what both say when it does not work."""

import pathlib

import numpy as np
import pytest
from gfx9 import assembly, compile_assembly, compile_hip, marks, tools
from gfx9.compile import cached


@pytest.fixture
def path(tmp_path, monkeypatch):
    """An empty PATH, and a function that puts programs on it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    tools.find.cache_clear()

    def put(*names: str) -> None:
        tools.find.cache_clear()
        for name in names:
            (tmp_path / name).write_text("#!/bin/sh\n")
            (tmp_path / name).chmod(0o755)

    yield put
    tools.find.cache_clear()


def test_release_22_first_then_the_newest(path):
    path("clang")
    assert pathlib.Path(tools.tool("clang")).name == "clang"
    path("clang-9", "clang-21")
    assert pathlib.Path(tools.tool("clang")).name == "clang-21"
    path("clang-22", "clang-23", "clang-format-24")
    assert pathlib.Path(tools.tool("clang")).name == "clang-22"


def test_missing_tools(path, monkeypatch):
    monkeypatch.setattr(tools, "_ROCM", "/nowhere")
    path("clang-22", "clang++-22", "llvm-readelf-22")
    assert tools.missing_tools() == "not installed: ld.lld, llvm-objdump"
    with pytest.raises(FileNotFoundError, match="llvm-objdump is not installed: the emulator needs LLVM 20"):
        tools.tool("llvm-objdump")


def test_a_file_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_MLA_TEST_CACHE", str(tmp_path / "cache"))
    made = []

    def make(path: pathlib.Path) -> None:
        made.append(path)
        path.write_text("content")

    first = cached(".txt", ["a", b"b"], make)
    assert cached(".txt", ["a", b"b"], make) == first
    assert cached(".txt", ["ab"], make) != first
    assert len(made) == 2
    assert first.read_text() == "content"


def test_a_file_that_fails_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_MLA_TEST_CACHE", str(tmp_path))

    def fail(path: pathlib.Path) -> None:
        path.write_text("half")
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        cached(".txt", ["x"], fail)
    assert list(tmp_path.iterdir()) == []


@marks.needs_llvm
def test_errors_of_the_compiler(tmp_path):
    with pytest.raises(RuntimeError, match="invalid instruction"):
        compile_assembly("v_add_f99 v0, v1, v2", "gfx950")
    with pytest.raises(RuntimeError, match="unknown type name 'nothing'"):
        compile_hip("nothing x;", "gfx942")
    source = tmp_path / "k.hip"
    source.write_text('#include "missing.h"')
    with pytest.raises(RuntimeError, match=r"missing\.h"):
        compile_hip(source, "gfx942")


@marks.needs_llvm
def test_a_change_in_a_header_compiles_again(tmp_path):
    source, header = tmp_path / "k.hip", tmp_path / "value.h"
    source.write_text('#include "value.h"\nextern "C" __attribute__((global)) void k(int* out) { *out = VALUE; }')
    made = []
    for value in (1, 2, 1):
        header.write_text(f"#define VALUE {value}")
        made.append(compile_hip(source, "gfx950"))
    assert made[0] != made[1]
    assert made[0] == made[2]


@pytest.mark.parametrize("inputs", [[np.arange(64)], [np.zeros(32, np.uint32)]])
def test_inputs_of_an_assembly_test(inputs):
    with pytest.raises(ValueError, match="64 values of 32 bits"):
        assembly.run("s_nop 0", "gfx950", inputs, [])
