"""The AMD kernels through the ROCm module's entry functions, from a struct of parameters to the numbers: their machine
code for each architecture, executed by the emulator with its checks of bounds, races and waits, against float64.

JAX_MLA_ROCM_DRIVER names the folder of the native driver (tests/rocm_driver.py says how to build it). With
JAX_MLA_ROCM_ALL=1 the groups run all their cases rather than a selection. With JAX_MLA_ROCM_DEVICE=0 and
HIP_LAUNCH_BLOCKING=1 they do so on that GPU of this machine instead.
"""

import os
import re
import subprocess
import sys
import textwrap

import pytest
import rocm_driver
from gfx9.tools import tool
from rocm_driver import ARCHITECTURES, FOLDER

from jax_mla import _ffi

pytestmark = pytest.mark.skipif(FOLDER is None, reason="JAX_MLA_ROCM_DRIVER is not set: tests/rocm_driver.py")

GPU = os.environ.get("JAX_MLA_ROCM_DEVICE")
QUICK = GPU is None and os.environ.get("JAX_MLA_ROCM_ALL") != "1"
standin_only = pytest.mark.skipif(GPU is not None, reason="asks the stand-in of the HIP runtime")
GROUPS = (
    "casts", "decode", "decode_bad_values", "decode_garbage", "decode_hidden_nan", "decode_refusals",
    "decode_same_bits", "gather_context", "merge_states", "pack_kv", "pack_tiles", "padding", "plan", "plan_rule",
    "prefill", "prefill_refusals", "reduce", "refusals", "sparse_decode", "sparse_decode_edges",
    "sparse_decode_refusals", "update_cache",
)  # fmt: skip


def in_another_process(code):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.path.dirname(__file__)},
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def driver():
    return rocm_driver.Driver(FOLDER, real=GPU is not None)


@pytest.fixture
def devices():
    """The ordinal of a device of each architecture; on real hardware the one that was named."""
    return {name: i for i, name in enumerate(ARCHITECTURES)} if GPU is None else {"gpu": int(GPU)}


def test_every_group_is_listed(driver):
    assert sorted(driver.groups()) == sorted(GROUPS)


@pytest.mark.parametrize("architecture", ARCHITECTURES if GPU is None else ["gpu"])
@pytest.mark.parametrize("group", GROUPS)
def test_group(driver, devices, group, architecture):
    checks, failures = driver.run(group, devices[architecture], quick=QUICK)
    assert failures == ""
    assert checks > 10


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (70, 1024, 2, 3), (70, 1025, 2, 3), (8192, 65536, 24, 4), (9, 5000, 600, 1)]
)
def test_scratch_of_prefill(driver, shape):
    """What the wrapper allocates is what the entry function asks for."""
    assert _ffi.prefill_scratch_bytes(*shape) == driver.prefill_scratch(*shape)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills_registers(architecture):
    """Of every kernel of the module: nothing in scratch memory, and no scalar register kept in a vector one."""
    objects = sorted((FOLDER / "code_objects").rglob(f"*.{architecture}.co"))
    assert objects
    for path in objects:
        notes = subprocess.run([tool("llvm-readelf"), "--notes", path], capture_output=True, text=True, check=True)
        found = re.findall(r"\.(private_segment_fixed_size|sgpr_spill_count|vgpr_spill_count): +(\d+)", notes.stdout)
        assert found and all(count == "0" for _, count in found), (path.name, found)


@standin_only
def test_unknown_group(driver):
    assert driver.run("no such group", 0, quick=True) == (-1, "")


@standin_only
@pytest.mark.parametrize("order", ["backward", "interleaved"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_order_of_waves_changes_nothing(driver, devices, order, architecture):
    """Waves that run in another order, or a few instructions each in turn, give results that pass too."""
    driver.order = order
    try:
        for group in ("plan_rule", "reduce", "decode_same_bits"):
            assert driver.run(group, devices[architecture], quick=True)[1] == ""
    finally:
        driver.order = "forward"


@standin_only
def test_object_and_launch_follow_the_device(driver):
    """Each device gets the code of its architecture; parameters, grid and block arrive as asked for."""
    for ordinal, architecture in enumerate(ARCHITECTURES):
        driver.launches.clear()
        assert driver.merge(ordinal) == ""
        assert driver.launches == [(architecture, "mla_merge_states_f32", (1, 1, 1), (2, 128, 1), 0)]


@standin_only
def test_code_is_loaded_once_a_device(driver):
    assert driver.merge(0) == ""
    before = [driver.calls(entry) for entry in ("hipModuleLoadData", "hipModuleGetFunction", "hipModuleLaunchKernel")]
    for _ in range(3):
        assert driver.merge(0) == ""
    after = [driver.calls(entry) for entry in ("hipModuleLoadData", "hipModuleGetFunction", "hipModuleLaunchKernel")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 0, 3]


@standin_only
def test_threads_load_code_once(driver):
    driver.set_device(5, "gfx942")
    loads = driver.calls("hipModuleLoadData")
    assert driver.merge_from_threads(5, 8) == ""
    assert driver.calls("hipModuleLoadData") == loads + 1


@standin_only
def test_code_is_loaded_while_a_stream_is_captured(driver):
    """A kernel's first launch may be one that XLA captures into a graph."""
    driver.set_device(2, "gfx950")
    driver.standin.standin_capture(True)
    try:
        loads = driver.calls("hipModuleLoadData")
        assert driver.merge(2) == ""
        assert driver.calls("hipModuleLoadData") == loads + 1
    finally:
        driver.standin.standin_capture(False)


@standin_only
def test_other_architectures(driver):
    driver.set_device(3, "gfx90a:sramecc+:xnack-")
    assert driver.merge(3) == ("jax_mla: device 3 is a gfx90a, and merge/gfx9/merge was built for gfx942, gfx950")


@standin_only
@pytest.mark.parametrize(
    ("entry", "status", "message"),
    [
        ("hipGetDevice", 1, "jax_mla: device 4 cannot be made the current one: hipErrorInvalidValue"),
        ("hipSetDevice", 101, "jax_mla: device 4 cannot be made the current one: hipErrorInvalidDevice"),
        (
            "hipGetDevicePropertiesR0600",
            1,
            "jax_mla: the properties of device 4 cannot be read: hipErrorInvalidValue",
        ),
        (
            "hipModuleLoadData",
            2,
            r"jax_mla: loading the code of merge/gfx9/merge for gfx942 \(\d+ bytes\) on device 4 failed: "
            "hipErrorOutOfMemory",
        ),
        (
            "hipModuleGetFunction",
            500,
            "jax_mla: the code of merge/gfx9/merge for gfx942 has no mla_merge_states_f32 on device 4: "
            "hipErrorNotFound",
        ),
        (
            "hipModuleLaunchKernel",
            719,
            "jax_mla: launching mla_merge_states_f32 with grid 1 x 1 x 1, block 2 x 128 x 1 and 0 bytes of dynamic LDS "
            "on device 4 failed: hipErrorLaunchFailure",
        ),
    ],
)
def test_a_refusal_is_a_sentence_and_not_for_ever(driver, entry, status, message):
    """What the runtime refuses is told with values; the next call tries again. In a process of its own, since nothing
    is asked twice of a device once it is known."""
    code = f"""
        import re
        from rocm_driver import FOLDER, Driver
        driver = Driver(FOLDER)
        driver.set_device(4, "gfx942")
        driver.refuse({entry!r}, {status})
        text = driver.merge(4)
        assert re.match({message!r}, text), text
        driver.refuse({entry!r}, 0)
        assert driver.merge(4) == "", driver.merge(4)
        """
    in_another_process(code)


@standin_only
def test_a_copy_that_fails(driver):
    assert driver.copy(0) == ""
    driver.refuse("hipMemcpyAsync", 1)
    try:
        assert driver.copy(0).startswith("jax_mla: copying 16 bytes on device 0 failed: hipErrorInvalidValue")
    finally:
        driver.refuse("hipMemcpyAsync", 0)


@standin_only
def test_memory_that_is_not_cleared(driver):
    """update_cache's search for duplicates among many tokens begins with a memset."""
    driver.refuse("hipMemsetAsync", 1)
    try:
        failures = driver.run("update_cache", 0, quick=True)[1]
    finally:
        driver.refuse("hipMemsetAsync", 0)
    assert "jax_mla: update_cache cannot clear 4096 bytes: hipErrorInvalidValue" in failures


@standin_only
def test_a_runtime_that_lacks_a_function(tmp_path):
    """Older than the oldest supported one, say."""
    library = tmp_path / "libamdhip64.so.7"
    command = [tool("clang"), "-shared", "-Wl,-soname,libamdhip64.so.7", "-x", "c", os.devnull, "-o", library]
    subprocess.run(command, check=True)
    in_another_process(f"""
        import ctypes
        from rocm_driver import FOLDER
        empty = ctypes.CDLL({str(library)!r})
        library = ctypes.CDLL(str(FOLDER / "libmla_rocm_driver.so"))
        text = ctypes.create_string_buffer(1000)
        library.mla_rocm_refusal_without_runtime(text, ctypes.c_size_t(len(text)))
        assert text.value == b"jax_mla: the HIP runtime has no hipGetDevice", text.value
        """)


@standin_only
def test_a_fault_in_a_kernel_is_a_failed_launch(driver):
    """What the emulator finds (here: memory that is no longer there) ends the call with an error, and is not lost."""
    allocations = driver._memory
    driver._memory = rocm_driver.Memory
    driver.failure = None
    try:
        assert driver.merge(0).endswith("hipErrorLaunchFailure, as the stand-in was told")
        assert isinstance(driver.failure, rocm_driver.EmulatorError)
    finally:
        driver._memory = allocations


@standin_only
def test_without_a_runtime():
    """No libamdhip64 anywhere: a sentence, no crash."""
    code = """
        import ctypes, os
        from rocm_driver import FOLDER
        library = ctypes.CDLL(str(FOLDER / "libmla_rocm_driver.so"))
        text = ctypes.create_string_buffer(1000)
        library.mla_rocm_refusal_without_runtime(text, ctypes.c_size_t(len(text)))
        assert b"the HIP runtime is not on this machine" in text.value, text.value
        """
    in_another_process(code)
