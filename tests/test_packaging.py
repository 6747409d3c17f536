"""What is built, shipped and said on the way: the library's symbols and instructions, setup.py's
messages, the contents of the source distribution.
"""

import itertools
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

import flash_csa
from flash_csa import _C
from op_calls import CALLS, Scene

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(flash_csa.__file__).resolve().parent
LIBRARY = Path(_C.__file__)
LEVELS = ("baseline", "avx2", "avx512", "avx512vnni", "amx")
ROUND_TRIP = """
import torch, flash_csa
pages = flash_csa.Pages.empty(1, "WindowFp8", 8)
slots = torch.arange(8, dtype=torch.int32)
flash_csa.store(torch.ones(8, 512).bfloat16(), pages, slots)
assert flash_csa.load(pages, slots).eq(1).all()
print(flash_csa.__file__)
"""


def output(*command: str, text_in: str | None = None) -> str:
    """What a tool of binutils or the toolkit says."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    done = subprocess.run(command, input=text_in, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("target", ["lint", "test", "demo"])
def test_make_runs_programs_of_the_environment(target, monkeypatch):
    """Found on the PATH or in .venv, never in the current folder."""
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(folders))  # an active environment with PyTorch
    recipe = output("make", "-C", str(ROOT), "-n", target, "PYTHON=python3")
    commands = re.findall(r"(?:^|[|]\s*xargs\s+|&&\s*)([\w./-]+)", recipe, re.M)
    found = {word for word in commands if not re.match(r"make(\[|:)?", word)}
    assert found & {"python3", ".venv/bin/python"}
    assert not [word for word in found if word.startswith("./")]


# ---- the library


@pytest.mark.case("Torch ABI")
def test_only_the_stable_abi_of_pytorch():
    """No C++ symbol of PyTorch: only its C interface, and CPython's limited API."""
    assert LIBRARY.name == "_C.abi3.so"
    names = [line.split()[-1] for line in output("nm", "-D", "-u", str(LIBRARY)).splitlines()]
    plain = output("c++filt", text_in="\n".join(names)).splitlines()
    foreign = [
        n for n in plain if re.match(r"(vtable for |typeinfo for )?(c10|at|torch|caffe2)::", n)
    ]
    assert not foreign
    assert any(n.startswith("aoti_torch_") for n in names)


@pytest.mark.case("Torch ABI")
def test_what_the_library_needs():
    dynamic = output("readelf", "-d", str(LIBRARY))
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert "libtorch.so" in needed, "the linker dropped it: no CUDA tensor would be known"
    assert not [n for n in needed if "cuda" in n or "cudart" in n or "python" in n]
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic


@pytest.mark.case("Torch ABI")
def test_the_stream_is_asked_for_weakly():
    """A CPU-only PyTorch has no such symbol: a strong reference would be an ImportError."""
    lines = output("nm", "-D", "-u", str(LIBRARY)).splitlines()
    cuda = [
        line.split() for line in lines if "cuda" in line and "aoti_torch_device_type" not in line
    ]
    assert all(kind == "w" for kind, *_ in cuda)
    assert bool(cuda) == _C.HAS_CUDA


def section(name: str, folder: Path) -> bytes:
    """One section of the library."""
    output("objcopy", "-O", "binary", f"--only-section={name}", str(LIBRARY), str(folder / name))
    return (folder / name).read_bytes()


@pytest.mark.case("Complete artefacts")
def test_messages_name_no_folder_of_the_build(tmp_path):
    """Line tables of the kernels may, for profilers; what a user can see may not."""
    data = section(".rodata", tmp_path)
    assert b"flash_csa." in data and str(ROOT).encode() not in data


def instructions() -> list[tuple[str, str]]:
    """(function, instruction) of the whole library."""
    found, function = [], ""
    for line in output("objdump", "-d", "-C", "--no-show-raw-insn", str(LIBRARY)).splitlines():
        if match := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            function = match[1]
        elif "\t" in line:
            found.append((function, line.split("\t", 1)[1]))
    return found


@pytest.mark.case("Portable CPU kernels")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="levels are for x86-64")
def test_wide_instructions_stay_in_their_dispatched_functions():
    """What any processor runs holds no AVX, what one with AVX2 runs no AVX-512, and byte dot
    products and matrices stand where they are asked for by name.
    """
    matrices = 0
    seen = dict.fromkeys(("run_avx2<", "run_avx512<", "Vnni"), 0)
    for function, instruction in instructions():
        level = next((mark for mark in reversed(seen) if mark in function), None)
        if re.search(r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|[23]\d)", instruction):
            assert level in ("run_avx512<", "Vnni"), f"{instruction} in {function}"
        if instruction.startswith("vpdp"):
            assert level == "Vnni", f"{instruction} in {function}"
        if re.match(r"tdp|tile|ldtile|sttile", instruction):
            assert re.search("multiply_amx|AmxTiles", function), f"{instruction} in {function}"
            matrices += 1
        if re.match(r"v(?!er[rw])[a-z]", instruction):
            assert level is not None, f"{instruction} in {function}"
            seen[level] += 1
    assert matrices and all(seen.values()), "a level without vector code: this test could not fail"


@pytest.mark.case("Portable CPU kernels")
@pytest.mark.parametrize("name", [name for name in CALLS if name != "probe"])
def test_every_instruction_level_gives_the_same_bytes(name):
    best, results = _C.cpu_level(), {}
    try:
        for level in LEVELS[: 1 + LEVELS.index(best)]:
            _C.set_cpu_level(level)
            call = CALLS[name](Scene())
            call()
            written = {n: t for n, t in call.mutated().items() if n != "workspace"}  # scratch
            results[level] = {n: t.view(torch.uint8) for n, t in written.items()}
    finally:
        _C.set_cpu_level(best)
    for level, argument in itertools.product(results, results[best]):
        assert torch.equal(results[level][argument], results[best][argument]), (level, argument)


@pytest.mark.case("Portable CPU kernels")
def test_a_level_that_is_not_there_is_refused():
    with pytest.raises(
        ValueError, match=r"flash_csa.set_cpu_level: level must be one .*, got sse9"
    ):
        _C.set_cpu_level("sse9")


@pytest.mark.case("Flags take effect")
def test_the_level_of_the_environment():
    code = "from flash_csa import _C; print(_C.cpu_level())"

    def started(level: str) -> subprocess.CompletedProcess:
        env = os.environ | {"FLASH_CSA_CPU_LEVEL": level}
        return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)

    assert started("baseline").stdout == "baseline\n"
    best = started("").stdout.strip()
    assert started(LEVELS[-1]).stdout.strip() == best  # lowers, and never raises
    assert started("AVX2").stderr.splitlines()[-1] == (
        f"ValueError: flash_csa: FLASH_CSA_CPU_LEVEL must be one of {', '.join(LEVELS)}, got AVX2"
    )


@pytest.mark.case("Architectures")
@pytest.mark.skipif(not _C.HAS_CUDA, reason="a build without CUDA kernels")
def test_machine_code_is_for_hopper(tmp_path):
    """sm_90a and nothing else: wgmma and setmaxnreg need the 'a'."""
    assert set(re.findall(rb"-arch (\w+)", section(".nv_fatbin", tmp_path))) == {b"sm_90a"}


# ---- import


def files_of_package() -> dict[str, int]:
    return {
        str(p): p.stat().st_mtime_ns
        for p in PACKAGE.rglob("*")
        if p.is_file() and p.suffix != ".pyc"
    }


@pytest.mark.case("JIT lock")
def test_four_processes_import_at_once_without_a_compiler():
    """Nothing is built or written at run time: no compiler, no home, no cache is needed."""
    env = {"PATH": "", "HOME": "/nonexistent", "PYTHONPATH": os.pathsep.join(sys.path)}
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "FLASH_CSA_VALIDATE": "1"}
    before = files_of_package()
    runs = [
        subprocess.Popen([sys.executable, "-c", ROUND_TRIP], cwd="/", env=env, stdout=-1, stderr=-1)
        for _ in range(4)
    ]
    for run in runs:
        _, errors = run.communicate(timeout=300)
        assert run.returncode == 0, errors.decode()
    assert files_of_package() == before


@pytest.mark.case("JIT lock")
def test_nothing_compiles_at_run_time():
    compilers = re.compile(r"cpp_extension|nvrtc|load_inline|\bnvcc\b|g\+\+")
    for path in PACKAGE.rglob("*.py"):
        assert not compilers.search(path.read_text()), path


@pytest.mark.case("Torch ABI")
def test_an_older_pytorch_gives_one_line():
    code = """
import sys, torch
for version in ("2.10.0", "1.13.1+cpu", "2.9.1+cu128"):
    torch.__version__ = version
    try:
        import flash_csa
    except ImportError as error:
        assert str(error) == f"flash_csa needs PyTorch >= 2.11, found {version}", error
    else:
        raise AssertionError(version)
    assert "flash_csa._C" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- setup.py

CHOICES = (
    "CUDA_HOME",
    "CUDA_PATH",
    "FLASH_CSA_CPU_ONLY",
    "FORCE_CUDA",
    "TORCH_CUDA_ARCH_LIST",
    "CXX",
)


@pytest.fixture
def configure(monkeypatch, capsys):
    """Runs setup.py without building: (the extension, what was printed), or the line it ends with.

    No toolkit is found but one that the environment names.
    """
    exists = Path.exists
    asked = {}

    def run(**env: str):
        for name in CHOICES:
            monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        try:
            runpy.run_path(str(ROOT / "setup.py"))
        except SystemExit as end:
            assert "\n" not in str(end)
            return str(end)
        return asked["ext_modules"][0], capsys.readouterr().out

    monkeypatch.setattr("setuptools.setup", lambda **options: asked.update(options))
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(torch.version, "cuda", torch.version.cuda)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        Path, "exists", lambda self: not str(self).startswith("/usr/local/cuda") and exists(self)
    )
    return run


@pytest.fixture
def toolkit(tmp_path) -> Path:
    """A folder that looks like a CUDA toolkit."""
    for name in ("include/cuda_runtime.h", "bin/nvcc", "lib64/libcudart_static.a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


CPU_HALF = "flash_csa: no CUDA toolkit in use: building the CPU half only\n"


@pytest.mark.case("No nvcc")
def test_without_a_toolkit_the_cpu_half_is_built(configure):
    built, said = configure()
    assert said == CPU_HALF
    assert built.sources and all(s.startswith(("csrc/cpu", "csrc/ops")) for s in built.sources)
    assert "-DUSE_CUDA" not in built.extra_compile_args["cxx"]


@pytest.mark.case("No nvcc")
def test_cpu_only_is_obeyed_where_a_toolkit_is(configure, toolkit):
    built, said = configure(FLASH_CSA_CPU_ONLY="1", CUDA_HOME=str(toolkit))
    assert said == CPU_HALF and not [s for s in built.sources if s.endswith(".cu")]


@pytest.mark.case("No nvcc")
@pytest.mark.parametrize("env", [{}, {"FLASH_CSA_CPU_ONLY": "1"}])
def test_force_cuda_without_a_toolkit_ends_with_one_line(configure, env):
    assert configure(FORCE_CUDA="1", **env) == (
        "flash_csa: FORCE_CUDA=1 needs a CUDA toolkit, found none (set CUDA_HOME)"
    )


@pytest.mark.case("No nvcc")
@pytest.mark.parametrize("missing", ["include/cuda_runtime.h", "bin/nvcc"])
def test_half_a_toolkit_is_none(configure, toolkit, missing):
    (toolkit / missing).unlink()
    assert configure(CUDA_HOME=str(toolkit))[1] == CPU_HALF


@pytest.mark.case("No nvcc")
def test_a_toolkit_without_its_runtime_ends_with_one_line(configure, toolkit):
    (toolkit / "lib64/libcudart_static.a").unlink()
    assert configure(CUDA_HOME=str(toolkit)) == (
        f"flash_csa: needs libcudart_static.a, found none under {toolkit}"
    )


@pytest.mark.case("Architectures")
@pytest.mark.parametrize("archs", [None, "9.0", "9.0a", "8.0;9.0a", "12.0"])
def test_kernels_are_built_for_hopper_whatever_is_asked(configure, toolkit, archs):
    env = {} if archs is None else {"TORCH_CUDA_ARCH_LIST": archs}
    built, said = configure(CUDA_HOME=str(toolkit), **env)
    flags = built.extra_compile_args["nvcc"]
    assert [f for f in flags if "arch" in f] == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0a"  # else PyTorch adds flags of its own
    assert [s for s in built.sources if s.endswith(".cu")]
    ignored = archs in ("8.0;9.0a", "12.0")
    assert said == ignored * (
        f"flash_csa: kernels are for sm_90a alone; TORCH_CUDA_ARCH_LIST={archs} is ignored\n"
    )


@pytest.mark.case("Torch ABI")
def test_setup_under_an_older_pytorch_ends_with_one_line(configure, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.0+cpu")
    assert configure() == "flash_csa: needs PyTorch >= 2.11, found 2.10.0+cpu"


def test_setup_without_a_compiler_ends_with_one_line(configure, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda *_: None)
    assert configure() == (
        "flash_csa: needs a C++17 compiler, found none (Debian: apt-get install g++)"
    )


def test_setup_without_python_headers_ends_with_one_line(configure, monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert configure() == (
        "flash_csa: needs Python's headers, found none (Debian: apt-get install python3-dev)"
    )


@pytest.mark.case("No nvcc")
def test_readme_says_what_build_isolation_does():
    text = " ".join((ROOT / "README.md").read_text().split())
    assert "--no-build-isolation" in text and "isolation would fetch another PyTorch" in text


# ---- the source distribution


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The source distribution of a copy of this tree."""
    folder = tmp_path_factory.mktemp("sdist")
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__")
    shutil.copytree(ROOT, folder / "tree", ignore=unwanted)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "-d", str(folder)],
        cwd=folder / "tree",
        env=os.environ | {"FLASH_CSA_CPU_ONLY": "1"},
        check=True,
        capture_output=True,
    )
    (archive,) = folder.glob("flash_csa-*.tar.gz")
    return archive


def shipped(sdist: Path) -> dict[str, bytes]:
    """Files of the source distribution by their path in it."""
    with tarfile.open(sdist) as archive:
        files = {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}
    return {name.split("/", 1)[1]: content for name, content in files.items()}


@pytest.mark.case("Complete artefacts")
def test_sdist_has_every_source(sdist):
    files = shipped(sdist)
    for folder, suffixes in (("csrc", (".h", ".cuh", ".cpp", ".cu")), ("python", (".py",))):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in suffixes:
                assert str(path.relative_to(ROOT)) in files
    data = PACKAGE / "data"
    for path in data.rglob("*") if data.exists() else ():
        if path.is_file() and path.suffix != ".pyc":
            assert f"python/flash_csa/{path.relative_to(PACKAGE)}" in files
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "Makefile"} <= set(files)


@pytest.mark.case("Complete artefacts")
def test_sdist_has_nothing_else(sdist):
    """No test data, nothing built, and no folder of the machine that made it."""
    files = shipped(sdist)
    assert not [name for name in files if name.startswith(("tests/", "bench/", "build/"))]
    assert not [name for name in files if name.endswith((".so", ".pyc", ".o", ".npz"))]
    for name, content in files.items():
        for folder in (str(ROOT), str(Path.home()), sys.prefix):
            assert folder == "/" or f"{folder}/".encode() not in content, f"{folder} in {name}"


@pytest.mark.slow
@pytest.mark.case("Complete artefacts")
def test_wheel_from_sdist_works_elsewhere(sdist, tmp_path):
    """sdist -> empty folder -> wheel -> fresh environment -> a record written and read."""
    shutil.unpack_archive(sdist, tmp_path)
    (tree,) = tmp_path.glob("flash_csa-*")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"FLASH_CSA_CPU_ONLY": "1"}
    pip = ["-m", "pip", "--disable-pip-version-check", "-q"]
    build = [
        sys.executable,
        *pip,
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        ".",
        str(tree),
    ]
    subprocess.run(build, cwd=tmp_path, env=env, check=True)
    (wheel,) = tmp_path.glob("flash_csa-*-cp310-abi3-*.whl")
    shutil.rmtree(tree)

    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "fresh")], check=True)
    fresh = tmp_path / "fresh/bin/python"
    subprocess.run([fresh, *pip, "install", "--no-deps", str(wheel)], env=env, check=True)
    (site,) = (tmp_path / "fresh/lib").glob("python*/site-packages")
    borrowed = [p for p in sys.path if p.endswith("-packages")]  # PyTorch and numpy
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    done = subprocess.run(
        [fresh, "-c", ROUND_TRIP], cwd="/", env=env, check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith(str(tmp_path / "fresh"))
