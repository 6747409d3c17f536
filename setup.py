"""Builds flash_csa._C: one abi3 library on PyTorch's stable ABI, for CPU-only and CUDA PyTorch.

With a CUDA toolkit the kernels for sm_90a are compiled in; without one, or with
FLASH_CSA_CPU_ONLY=1, the CPU half alone. FORCE_CUDA=1 makes a missing toolkit an error.
"""

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import torch
from setuptools import setup
from torch.utils import cpp_extension as ext

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 11)
HOPPER = "-gencode=arch=compute_90a,code=sm_90a"  # wgmma and setmaxnreg need the 'a'


def fail(line: str) -> None:
    sys.exit(f"flash_csa: {line}")


def find_toolkit() -> Path | None:
    """The CUDA toolkit's folder: named by the environment, known to PyTorch, or conventional."""
    if os.environ.get("FLASH_CSA_CPU_ONLY") == "1":
        return None
    named = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), ext.CUDA_HOME)
    for place in map(Path, filter(None, (*named, "/usr/local/cuda"))):
        if all((place / part).exists() for part in ("bin/nvcc", "include/cuda_runtime.h")):
            return place
    return None


def check_environment(toolkit: Path | None) -> None:
    version = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    if version < OLDEST_TORCH:
        fail(f"needs PyTorch >= 2.11, found {torch.__version__}")
    if not shutil.which(os.environ.get("CXX", "c++")) and not shutil.which("g++"):
        fail("needs a C++17 compiler, found none (Debian: apt-get install g++)")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        fail("needs Python's headers, found none (Debian: apt-get install python3-dev)")
    if toolkit is None and os.environ.get("FORCE_CUDA") == "1":
        fail("FORCE_CUDA=1 needs a CUDA toolkit, found none (set CUDA_HOME)")
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if toolkit and archs and archs not in ("9.0", "9.0a"):
        print(f"flash_csa: kernels are for sm_90a alone; TORCH_CUDA_ARCH_LIST={archs} is ignored")


def cutlass_include() -> list[str]:
    """CuTe and CUTLASS headers, from the package nvidia-cutlass."""
    spec = importlib.util.find_spec("cutlass_library")
    return [str(Path(spec.origin).parent / "source" / "include")] if spec and spec.origin else []


def source_root() -> Path:
    """csrc; with FCSA_MUTATE=n a copy with fault n of tests/mutants, beside the build folder."""
    number = os.environ.get("FCSA_MUTATE")
    if not number:
        return ROOT / "csrc"
    if sys.argv[1:3] != ["build_ext", "-b"]:
        fail("FCSA_MUTATE goes with `setup.py build_ext -b FOLDER/python` alone")
    sys.path.insert(0, str(ROOT / "tests"))
    from mutants.mutants import mutated_copy

    return mutated_copy(int(number), ROOT / "csrc", Path(sys.argv[3]).resolve().parent / "csrc")


def link_arguments(toolkit: Path | None) -> list[str]:
    # The linker would drop libtorch.so, whose symbols are only looked up at run time.
    libtorch = Path(torch.__file__).parent / "lib" / "libtorch.so"
    arguments = ["-Wl,--no-as-needed", str(libtorch), "-Wl,--as-needed"]
    if toolkit:
        places = (toolkit / "lib64", toolkit / "lib", toolkit / "targets" / "x86_64-linux" / "lib")
        runtime = next((p for d in places if (p := d / "libcudart_static.a").exists()), None)
        if runtime is None:
            fail(f"needs libcudart_static.a, found none under {toolkit}")
        arguments += [str(runtime), "-lrt", "-ldl", "-lpthread", "-Wl,--exclude-libs,ALL"]
    return arguments


def extension(toolkit: Path | None):
    suffixes = ("*.cpp", "*.cu") if toolkit else ("*.cpp",)
    folders = ("cpu", "ops", "sm90") if toolkit else ("cpu", "ops")
    csrc = source_root()
    sources = sorted(
        str(path.relative_to(ROOT))
        for folder in folders
        for suffix in suffixes
        for path in (csrc / folder).rglob(suffix)
    )
    defines = ["-DTORCH_TARGET_VERSION=0x020b000000000000"]
    include = [str(csrc)]
    if toolkit:
        defines.append("-DUSE_CUDA")
        include += [str(toolkit / "include"), *cutlass_include()]
        # A CPU-only PyTorch compiles the kernels too, once it is told where the toolkit is and
        # that .cu files have headers to watch.
        ext.CUDA_HOME = str(toolkit)
        torch.version.cuda = torch.version.cuda or "13.0"
        os.environ["TORCH_CUDA_ARCH_LIST"] = "9.0a"
    common = ["-O3", "-std=c++17", *defines]
    cxx = ["-g0", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"]
    nvcc = [HOPPER, "--expt-relaxed-constexpr", "-Xptxas=-v", "-lineinfo", "-fmad=false"]
    nvcc.append("-DNDEBUG")  # g++ has it from Python; assertions of headers name their folders
    return ext.CppExtension(
        "flash_csa._C",
        sources,
        include_dirs=include,
        py_limited_api=True,
        extra_compile_args={
            "cxx": [*common, *cxx, f"-fmacro-prefix-map={ROOT}/="],
            "nvcc": [*common, *nvcc],
        },
        extra_link_args=link_arguments(toolkit),
    )


# An environment that is used without being activated has its ninja beside its Python.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
toolkit = find_toolkit()
check_environment(toolkit)
if toolkit is None:
    print("flash_csa: no CUDA toolkit in use: building the CPU half only")
setup(
    ext_modules=[extension(toolkit)],
    cmdclass={"build_ext": ext.BuildExtension.with_options(use_ninja=True)},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
