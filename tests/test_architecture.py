"""The rules of the source tree: who may include whom, where a size or an instruction may stand."""

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from flash_csa import _C, RECORDS, sizes
from flash_csa.reference import layout

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
CPP = sorted(p for s in ("h", "cpp", "cu", "cuh") for p in CSRC.rglob(f"*.{s}"))
PYTHON = sorted((ROOT / "python").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BUILD = [ROOT / name for name in ("setup.py", "Makefile", "pyproject.toml")]
BUILD += sorted((ROOT / "cmake").rglob("CMakeLists.txt"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def each(paths: list[Path]):
    return pytest.mark.parametrize("path", paths, ids=name)


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.M)


def cpp_code(path: Path) -> str:
    """The text without comments and strings."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.S)
    return re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)


def python_numbers(path: Path) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return {token.string for token in tokens if token.type == tokenize.NUMBER}


# What a folder may include of the project: itself and what it stands on.
STANDS_ON = {
    "core": {"core"},
    "cpu": {"core", "cpu"},
    "sm90": {"core", "sm90"},
    "ops": {"core", "cpu", "sm90", "ops"},
}


@each(CPP)
def test_includes_follow_the_dependency_rule(path):
    folder = path.relative_to(CSRC).parts[0]
    folders = {line.split("/")[0] for line in includes(path)}
    assert folders & set(STANDS_ON) <= STANDS_ON[folder]


@each(CPP)
def test_project_includes_name_their_folder(path):
    """`#include "core/x.h"`, from csrc: so that the rule above sees every include."""
    for line in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.M):
        assert (CSRC / line).exists(), line


@each(CPP)
def test_frameworks_stay_in_their_layer(path):
    folder = path.relative_to(CSRC).parts[0]
    for line in includes(path):
        first = line.split("/")[0]
        if first in ("torch", "ATen", "c10", "Python.h", "pybind11"):
            assert folder == "ops", f"{line} outside csrc/ops"
            assert first not in ("ATen", "c10", "pybind11"), f"{line} is no stable ABI"
            assert first != "torch" or "/stable/" in line or "/headeronly/" in line, line
        if first.startswith(("cuda", "cutlass", "cute")):
            assert folder in ("sm90", "ops"), f"{line} in csrc/{folder}"


def test_record_sizes_stand_in_one_place():
    """288, 528, 68, 584 and 132 bytes: the table knows them, everything else asks it."""
    written = re.compile(
        rf"(?<![\w.])(?:{'|'.join(str(r.bytes) for r in RECORDS.values())})(?![\w.])"
    )
    assert written.pattern.count("|") == 4
    cpp = {name(p) for p in CPP if written.search(cpp_code(p))}
    assert cpp == {"csrc/core/records.h"}
    python = {name(p) for p in PYTHON if any(map(written.fullmatch, python_numbers(p)))}
    assert python <= {"python/flash_csa/reference/layout.py"}


@each(CPP + PYTHON + TESTS)
def test_files_are_of_readable_length(path):
    assert len(path.read_text().splitlines()) <= 600


@each(CPP)
def test_cpp_functions_are_of_readable_length(path):
    """From a line at the margin that opens a block to the brace at the margin that closes it."""
    start = None
    for number, line in enumerate(path.read_text().splitlines()):
        opens = line.endswith("{") and not line.startswith((" ", "}", "#", "//"))
        if opens and not re.match(r"(inline )?namespace|extern|struct|class|enum|template", line):
            start = number
        if line == "}" and start is not None:
            assert number - start < 80, f"line {start + 1}"
            start = None


@each(PYTHON)
def test_python_functions_are_of_readable_length(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 80, node.name


@each([p for p in CPP if p.suffix in (".cu", ".cuh")])
def test_one_kernel_in_a_file(path):
    assert len(re.findall(r"\b__global__\b", cpp_code(path))) <= 1


@each(CPP)
def test_inline_assembly_is_wrapped(path):
    if not name(path).startswith("csrc/sm90/common/"):
        assert not re.search(r"\basm\b|\b__asm", cpp_code(path))


@pytest.mark.case("Portable CPU kernels")
def test_builds_are_portable_and_exact():
    """No code for the build machine alone, and no arithmetic that differs between levels."""
    for path in BUILD:
        text = path.read_text()
        for flag in ("-march=", "-mavx", "-mtune=native", "fast-math", "fast_math", "-Ofast"):
            assert flag not in text, f"{flag} in {name(path)}"
        if "-O3" in text:
            assert "-ffp-contract=off" in text, name(path)
    for path in CPP:
        assert not re.search(r"#pragma.*(GCC optimize|STDC FP_CONTRACT ON)", path.read_text())


@pytest.mark.parametrize("record", list(RECORDS))
def test_reference_layout_is_the_librarys(record):
    """The reference states the formats by itself; both statements are the same."""
    ours, theirs = RECORDS[record], layout.RECORDS[record]
    sizes_of = ("dims", "coded_dims", "group", "data_bytes", "scale_bytes", "bytes", "page_align")
    for field in (*sizes_of, "name", "element", "scale_kind", "page_order"):
        assert getattr(ours, field) == getattr(theirs, field), field
    for page_size in (1, 8, 61, 64, 256):
        assert ours.payload(page_size) == theirs.payload(page_size)


def test_the_reference_has_all_records():
    assert list(layout.RECORDS) == list(RECORDS)


def test_sizes_are_the_kernels():
    """Sizes that Python states, so that they can be traced, are those of core/schedule.h."""
    bounds = [
        (0, 0, 0, 0, 0, 1),
        (1, 64, 512, 16384, 0, 132),
        (4096, 128, 2048, 1 << 20, 2048, 132),
    ]
    bounds += [(7, 3, 100, 257, 8, 2), (4096, 0, 0, 4097, 1, 1), (1, 8, 1, 1 << 26, 0, 16)]
    for rows, heads, k, entries, pool, sms in bounds:
        assert sizes.schedule_size(num_sms=sms, max_rows_total=rows) == _C.schedule_size(sms, rows)
        for op in ("attend", "index_scores", "select", "index_select", "compress"):
            assert sizes.workspace_bytes(
                op,
                max_rows=rows,
                heads=heads,
                k=k,
                max_entries=entries,
                pool_blocks=pool,
                num_sms=sms,
            ) == _C.workspace_bytes(op, rows, heads, k, entries, pool, sms)
    for call in (sizes.workspace_bytes, lambda op, max_rows: _C.workspace_bytes(op, *[1] * 6)):
        with pytest.raises(ValueError, match="op must be one of attend, index_scores, select"):
            call("attnd", max_rows=1)


@pytest.mark.case("Import without GPU")
@pytest.mark.case("Dtypes")
def test_import_touches_no_gpu_and_no_small_float():
    """CUDA stays untouched, and the dtypes that older PyTorch lacks are not looked up."""
    code = """
import sys, torch

def fail(*_, **__):
    raise AssertionError("CUDA was asked")

for asked in ("init", "_lazy_init", "is_available", "device_count", "get_device_properties"):
    setattr(torch.cuda, asked, fail)
for dtype in [d for d in dir(torch) if d.startswith(("float8", "float4"))]:
    delattr(torch, dtype)
import flash_csa, flash_csa.reference
assert not torch.cuda.is_initialized()
assert not {m for m in sys.modules if m.split(".")[0] in ("triton", "matplotlib", "typer", "rich")}
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )
