"""What the tests run on: four devices on the CPU, and every implementation that this machine has."""

import os

# Before jax starts: the tests of sharding want several devices.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import pytest

import jax_mla


def implementations(operation: str) -> list:
    """Of an operation: XLA, and each built platform with each of its variants; what needs a GPU is marked so."""
    found = [pytest.param(("xla", "cpu"), id="xla"), pytest.param(("xla", "gpu"), id="xla-gpu", marks=pytest.mark.gpu)]
    for platform, device in (("cpu", "cpu"), ("cuda", "gpu")):
        marks = pytest.mark.gpu if device == "gpu" else ()
        rows = [row for row in jax_mla.capabilities(platform) if row.operation == operation]
        variants = list(dict.fromkeys(row.implementation for row in rows))
        names = [platform] * bool(rows) + variants * (len(variants) > 1)
        found += [pytest.param((name, device), id=name, marks=marks) for name in names]
    return found


def pytest_generate_tests(metafunc):
    if "implementation" in metafunc.fixturenames:
        metafunc.parametrize("implementation", implementations(metafunc.module.OPERATION), indirect=True)


@pytest.fixture
def implementation(request):
    """The name of each implementation of the module's OPERATION in turn, on a device that it runs on."""
    name, device = request.param
    with jax.default_device(jax.devices(device)[0]):
        yield name
