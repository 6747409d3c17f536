"""The C++ side of csrc/core: its own tests, and headers that stand alone in both compilers."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from core_module import ROOT, cmake_build

HEADERS = sorted((ROOT / "csrc" / "core").glob("*.h"))
TOOLKIT = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
NVCC = TOOLKIT / "bin" / "nvcc"


def ctest(folder: Path) -> str:
    command = ["ctest", "--test-dir", str(folder), "--output-on-failure"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compile_alone(header: Path, source: Path, command: list[str]) -> None:
    source.write_text(f'#include "core/{header.name}"\n')
    command = [*command, "-std=c++17", f"-I{ROOT / 'csrc'}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_cpp() -> None:
    assert "100% tests passed" in ctest(cmake_build())


def test_cpu_back_end_under_sanitizers() -> None:
    """Hostile positions, tables, slots and lengths in buffers of exactly their size."""
    program = cmake_build("cpu_fuzz") / "cpu_fuzz"
    # GCC before 14 misaligns 64-byte vectors in stack frames that it moves to the heap.
    options = os.environ | {"ASAN_OPTIONS": "detect_stack_use_after_return=0"}
    done = subprocess.run([str(program), "60"], capture_output=True, text=True, env=options)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_header_compiles_alone(header: Path, tmp_path: Path) -> None:
    command = ["c++", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    compile_alone(header, tmp_path / "alone.cpp", command)


@pytest.mark.skipif(not NVCC.exists(), reason="no CUDA toolkit")
@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_header_compiles_alone_with_nvcc(header: Path, tmp_path: Path) -> None:
    command = [str(NVCC), "-arch=sm_90a", "-Werror", "all-warnings", "-x", "cu", "-c"]
    compile_alone(header, tmp_path / "alone.cu", [*command, "-o", str(tmp_path / "alone.o")])


@pytest.mark.skipif(not (NVCC.exists() and torch.cuda.is_available()), reason="needs a GPU")
def test_device_equals_host() -> None:
    """Exhaustive codes and BF16 values, hashed FP32, groups, rows and scores: the same bits."""
    folder = cmake_build(cuda=NVCC)
    assert "device_test" in ctest(folder)
