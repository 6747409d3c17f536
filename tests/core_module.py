"""The C++ core as a Python module, built on demand for the tests."""

import fcntl
import functools
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from sysconfig import get_config_var
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "core-tests"


def cmake_build(*targets: str, cuda: Path | None = None) -> Path:
    """Configures cmake/ and builds `targets` (default: everything); returns the build folder.

    `cuda` is the nvcc that also builds the comparison of device and host.
    """
    pybind11 = pytest.importorskip("pybind11")
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("needs cmake and a C++ compiler")
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # parallel test processes
        configure = ["cmake", "-S", str(ROOT / "cmake"), "-B", str(BUILD)]
        configure += [f"-DPython_EXECUTABLE={sys.executable}"]
        configure += [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
        if cuda is not None:
            configure += ["-DFLASH_CSA_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={cuda}"]
        build = ["cmake", "--build", str(BUILD), "--parallel", "2"]
        for command in (configure, build + [f"--target={name}" for name in targets]):
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return BUILD


@functools.cache
def core() -> ModuleType:
    """csrc/core with numpy arrays in and out; BF16 and codes are bit patterns (uint16, uint8)."""
    path = cmake_build("flash_csa_core") / f"flash_csa_core{get_config_var('EXT_SUFFIX')}"
    spec = importlib.util.spec_from_file_location("flash_csa_core", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
