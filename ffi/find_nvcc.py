"""Prints the path of nvcc: CUDA_HOME's, PATH's, a usual installation's, or that of PyPI's packages. Nothing if none."""

import os
import pathlib
import shutil
import sys
import sysconfig


def candidates():
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield pathlib.Path(os.environ[variable], "bin", "nvcc")
    if os.environ.get("JAX_MLA_NVCC") != "pypi":
        on_path = shutil.which("nvcc")
        if on_path:
            yield pathlib.Path(on_path)
        yield pathlib.Path("/usr/local/cuda/bin/nvcc")
    # An isolated build sees its own packages on sys.path, and the environment it builds for in sysconfig.
    folders = [*sys.path, *(sysconfig.get_path(name) for name in ("purelib", "platlib"))]
    for folder in dict.fromkeys(folders):
        for layout in ("cu13", "cuda_nvcc"):
            yield pathlib.Path(folder or ".", "nvidia", layout, "bin", "nvcc")


if __name__ == "__main__":
    print(next((str(path) for path in candidates() if os.access(path, os.X_OK)), ""))
