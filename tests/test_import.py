"""Importing: without a GPU, without touching a backend, and with a jaxlib that is too old."""

import os
import subprocess
import sys
import textwrap

import pytest

from jax_mla import _ffi


def python(code, **environment):
    command = [sys.executable, "-P", "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=120)


def test_old_jaxlib_gives_one_clear_error():
    """A jaxlib older than the FFI headers: ImportError with what to install, and JAX itself goes on working."""
    done = python(
        """
        import jax, jaxlib
        jaxlib.__version__ = "0.9.2"
        try:
            import jax_mla
        except ImportError as error:
            print(error)
        print(jax.numpy.ones(3).sum())
        """
    )
    assert done.returncode == 0, done.stderr
    message, total = done.stdout.strip().splitlines()
    assert message.startswith("jax_mla needs jaxlib >= 0.10.2, found 0.9.2: ") and "pip install" in message
    assert total == "3.0"


@pytest.mark.parametrize("version", ["0.10.2", "0.11.2", "0.12.0.1", "0.12.0", "1.0.0", "0.12.0.dev20260101"])
def test_supported_versions(version):
    _ffi.check_jaxlib(version)


@pytest.mark.parametrize("version", ["0.10.1", "0.9.2", "0.8.2", "0.4.38"])
def test_unsupported_versions(version):
    with pytest.raises(ImportError, match=f"found {version}"):
        _ffi.check_jaxlib(version)


def test_modules_built_with_newer_headers_are_refused():
    """They would take the backend down with them: an error that says which versions meet, before registering."""
    header = "#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 3\n"
    assert _ffi.api_version(header) == (0, 3) and _ffi.api_version("") is None
    for supported in ((0, 3), (0, 5), (1, 0), None):
        _ffi.check_api_version("jax_mla._cpu", (0, 3), supported)
    for supported in ((0, 2), (0, 0)):
        with pytest.raises(ImportError, match=r"jax_mla\._cpu was built for version 0\.3 of XLA's FFI, and jaxlib"):
            _ffi.check_api_version("jax_mla._cpu", (0, 3), supported)
    built = {module.api_version() for module in _ffi.MODULES.values()}
    assert built <= {(0, 3)}, "built against newer headers than those of the oldest supported jaxlib"


def test_import_starts_no_backend():
    """After the import a process may still choose its devices."""
    done = python(
        """
        import os
        import jax, jax_mla
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 3)
        print(jax.device_count(), jax_mla.__version__)
        """,
        XLA_FLAGS="",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "3"


def test_import_without_a_gpu():
    """Every built module imports with no GPU and no driver, and the CPU's operations run."""
    done = python(
        """
        import jax, jax.numpy as jnp, jax_mla
        out, lse = jax_mla.merge_states(jnp.ones((2, 4)), jnp.zeros(2), jnp.ones((2, 4)), jnp.zeros(2))
        print(jax.default_backend(), float(out[0, 0]), sorted({row.platform for row in jax_mla.capabilities()}))
        """,
        CUDA_VISIBLE_DEVICES="",
        JAX_PLATFORMS="cpu",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cpu 1.0")


def test_public_names():
    """What `from jax_mla import *` gives is all there, and documented."""
    import jax_mla

    for name in jax_mla.__all__:
        value = getattr(jax_mla, name)
        assert not callable(value) or value.__doc__, name
