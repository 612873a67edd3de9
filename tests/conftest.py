"""What the tests run on: four devices on the CPU, and every implementation that this machine has."""

import fnmatch
import os

# Before jax starts: the tests of sharding want several devices.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import pytest

import jax_mla
from jax_mla.dispatch import default_platform, device_architecture, serves_architecture


def implementations(operation: str) -> dict[str, tuple[str, str]]:
    """Of an operation: XLA, and each built platform with each of its variants; by id, as (name, device)."""
    found = {"xla": ("xla", "cpu"), "xla-gpu": ("xla", "gpu")}
    gpu = "rocm" if default_platform() == "rocm" else "cuda"
    for platform, device in (("cpu", "cpu"), (gpu, "gpu")):
        here = device_architecture(platform)
        rows = [row for row in jax_mla.capabilities(platform) if row.operation == operation]
        rows = [row for row in rows if serves_architecture(row.architecture, here)]
        variants = list(dict.fromkeys(row.implementation for row in rows))
        chosen = any(not row.by_name for row in rows)
        by_variant = len(variants) > 1 or any(row.by_name for row in rows)
        names = [platform] * chosen + variants * by_variant
        found |= {name: (name, device) for name in names}
    return found


def takes(operation: str, name: str, q_dtype: str, cache_dtype: str) -> bool:
    """Whether an implementation has a row for these dtypes; XLA serves all."""
    rows = [row for row in jax_mla.capabilities() if row.operation == operation]
    named = (row for row in rows if name == row.implementation or (name == row.platform and not row.by_name))
    return name == "xla" or any((row.q_dtype, row.cache_dtype) == (q_dtype, cache_dtype) for row in named)


def pytest_configure(config):
    config.addinivalue_line("markers", "leave_out(*patterns): implementations, by id, that a test is not for")
    config.addinivalue_line("markers", "takes(q_dtype, cache_dtype): only implementations that serve these")


def pytest_generate_tests(metafunc):
    if "implementation" not in metafunc.fixturenames:
        return
    operation = metafunc.module.OPERATION
    left_out = [pattern for mark in metafunc.definition.iter_markers("leave_out") for pattern in mark.args]
    wanted = [mark.args for mark in metafunc.definition.iter_markers("takes")]
    params = [
        pytest.param(param, id=name, marks=pytest.mark.gpu if param[1] == "gpu" else ())
        for name, param in implementations(operation).items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in left_out)
        and all(takes(operation, param[0], *dtypes) for dtypes in wanted)
    ]
    metafunc.parametrize("implementation", params, indirect=True)


@pytest.fixture
def implementation(request):
    """The name of each implementation of the module's OPERATION in turn, on a device that it runs on."""
    name, device = request.param
    with jax.default_device(jax.devices(device)[0]):
        yield name
