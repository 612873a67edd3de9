"""What the machine code of AMD's decode kernels must be, whatever the compiler: no register is spilled, and tokens,
queries and results move 16 bytes at a time."""

import re

import pytest
from gfx9 import CodeObject
from rocm_driver import ARCHITECTURES, FOLDER

pytestmark = pytest.mark.skipif(FOLDER is None, reason="JAX_MLA_ROCM_DRIVER is not set: tests/rocm_driver.py")

NAMES = ("bf16", "f16", "bf16_fp8", "f16_fp8", "fp8", "bf16_ds_mla")
OBJECTS = [f"{operation}/gfx9/{name}" for operation in ("decode", "sparse") for name in NAMES]


@pytest.fixture(params=ARCHITECTURES)
def architecture(request):
    return request.param


@pytest.fixture(params=OBJECTS)
def code_object(request, architecture):
    return CodeObject(FOLDER / "code_objects" / f"{request.param}.{architecture}.co", architecture)


def test_two_sizes_of_tiles(code_object):
    assert sorted(name.rpartition("_")[2] for name in code_object.kernels) == ["32", "64"]


def test_nothing_is_spilled(code_object):
    for name, kernel in code_object.kernels.items():
        assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch) == (0, 0, 0), name


def test_accesses_are_wide(code_object, architecture):
    """Wide: tokens, queries, out. Narrow: an item of a plan, lengths, page ids of small pages, lse, the sink."""
    texts = [line.text for line in code_object.lines]
    stores = [text for text in texts if text.startswith("global_store_")]
    assert {re.match(r"global_store_(\w+)", text)[1] for text in stores} == {"dwordx4", "dword"}
    assert sum("dwordx4" in text for text in stores) >= 10 * sum("dwordx4" not in text for text in stores) > 0
    loads = [text for text in texts if re.match(r"global_load_(?!lds)", text)]
    assert not [text for text in loads if re.match(r"global_load_(u|s)(byte|short)", text)]
    copies = {text.split()[0] for text in texts if text.startswith("global_load_lds_")}
    assert copies <= {"global_load_lds_dwordx4"}
