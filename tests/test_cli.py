"""The command line: what it prints, and one line on bad input."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import flash_csa
from flash_csa import _C
from flash_csa.cli import info
from flash_csa.cli.app import app
from flash_csa.cli.support import _ranges, _up_to, supported

COMMANDS = ("accuracy", "bytes", "demo", "info", "plan", "traffic")


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def failure(*arguments: str) -> str:
    """The one line that a command fails with."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("flash_csa")
    assert result.stderr.count("\n") == 1 and result.stderr.endswith("\n")
    return result.stderr


def test_help_names_the_commands():
    for arguments in ((), ("--help",)):
        result = invoke(*arguments)
        assert result.exit_code == 0
        assert all(command in result.stdout for command in COMMANDS)
    for command in COMMANDS:
        assert "--json" in invoke(command, "--help").stdout


def test_info():
    result = invoke("info", "--no-probe")
    assert result.exit_code == 0
    assert flash_csa.__version__ in result.stdout and torch.__version__ in result.stdout

    found = json.loads(invoke("info", "--no-probe", "--json").stdout)
    assert set(found["versions"]) == {"flash_csa", "torch", "python"}
    assert found["back_ends"]["cpu"] == _C.cpu_level()
    assert (found["back_ends"]["cuda"] is not None) == _C.HAS_CUDA
    assert found["devices"]["probed"] == []
    assert found["records"]["MainFp4"] + found["records"]["IndexFp4"] == 356
    sizes = {"v41-flash": 890, "v4-flash": 3514.25, "v4-pro": 5031.4375}
    assert found["models"] == sizes
    assert all(name in result.stdout for name in sizes)


def test_info_initialises_no_gpu_unless_it_probes():
    """In a process of its own: a GPU that another test has initialised stays so."""
    program = """
import torch
from flash_csa.cli import info

torch.cuda.device_count = lambda: 1
found = info.collect(probe=False)
assert found["devices"]["gpus"] == 1 and "cuda" not in found["supported"], found
assert not torch.cuda.is_initialized(), "a GPU is initialised"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_info_runs_a_kernel_on_every_gpu(cuda):
    found = info.collect()
    assert len(found["devices"]["probed"]) == torch.cuda.device_count()
    assert {gpu["status"] for gpu in found["devices"]["probed"]} == {"runs"}
    assert "cuda" in found["supported"]


def test_supported_is_what_the_ops_accept():
    found = supported("cpu")
    assert {1, 2} <= set(found["ratios"])
    assert "MainFp4" in found["main_records"] and "IndexFp4" not in found["main_records"]
    assert "WindowFp8" in found["window_records"]
    assert "IndexFp4" in found["index_records"]
    assert (found["heads"], found["page_sizes"]) == (["any number"], ["1-256"])
    limits = {"index_heads": _C.MAX_INDEX_HEADS, "topk": _C.MAX_TOP_K}
    assert {axis: found[axis] for axis in limits} == {a: [f"1-{n}"] for a, n in limits.items()}


def test_supported_counts_say_that_they_are_ranges():
    """Not a list of those asked for, as if others were refused."""
    shown = " ".join(invoke("info", "--no-probe").stdout.split())
    for note in ("any number of attention; no limit, tried up to 256;", "16, 32 or blocks of 64"):
        assert note in shown
    assert shown.count("1-256") == 1  # page sizes
    assert f"1-{_C.MAX_TOP_K} any number up to the limit" in shown


def test_a_count_that_is_refused_is_no_part_of_a_range():
    def ask(value: int) -> None:
        if value in (9, 128):
            raise ValueError

    asked = [1, 2, 3, 4, 5, 6, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127]
    assert _up_to(128, ask) == _ranges(asked)
    assert _up_to(100, lambda value: None) == ["1-100"]


def test_supported_lists_nothing_that_raises(monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError("flash_csa.attend: not supported yet")

    monkeypatch.setattr(flash_csa, "attend", refuse)
    found = supported("cpu")
    assert found["main_records"] == found["heads"] == found["page_sizes"] == []
    assert found["ratios"] != []


def test_ranges():
    assert _ranges([]) == []
    assert _ranges([1, 2, 3, 8, 16, 17]) == ["1-3", "8", "16-17"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("bites",), "No such command 'bites'"),
        (("--verbose",), "No such option: --verbose"),
        (("info", "--verbose"), "No such option: --verbose"),
        (("info", "extra"), "unexpected extra argument"),
        (("bytes", "--model", "v5"), "v5"),
        (("bytes", "--page-size", "300"), "300"),
        (("bytes", "--main", "MainFp2"), "MainFp2"),
        (("bytes", "--context", "many"), "--context"),
        (("plan",), "one of v41-flash, v4-flash, v4-pro or a config.json must follow, got none"),
        (("plan", "v4-pro", "--model", "v4-flash"), "got v4-pro and --model v4-flash"),
        (("traffic", "--kernels", "zzz*"), "--kernels must come with --measure, got it alone"),
        (("demo", "--tokens", "0"), "--tokens"),
        (("demo", "--tokens", "-5"), "--tokens"),
        (("demo", "--tokens", "4097"), "must hold 4097 tokens (or use --synthetic), got 4096"),
        (("demo", "--pool-blocks", "0"), "--pool-blocks"),
        (("demo", "--model", "v5"), "one of v41-flash, v4-flash, v4-pro or a readable config.json"),
        (("demo", "--model", __file__), __file__),
        (("demo", "--model", "v4-pro", "--pool-blocks", "9"), "v4-pro has no candidate pool"),
        (("demo", "--seed", "-1"), "--seed"),
        (("demo", "--synthetic", "--input", "x"), "--input or --synthetic, not both"),
        (("demo", "--input", "missing.safetensors"), "cannot read missing.safetensors"),
        (("demo", "--input", "."), "cannot read ."),
        (("demo", "--input", __file__), f"cannot read {__file__}"),
    ],
)
def test_bad_input_is_one_line(arguments, expected):
    assert expected in failure(*arguments)


STATES = torch.zeros(40, 32, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"hidden": STATES}, "must hold a tensor hidden_states, got ['hidden']"),
        ({"hidden_states": STATES.float()}, "must be bfloat16 [tokens, width], got torch.float32"),
        ({"hidden_states": STATES[None]}, "got torch.bfloat16 [1, 40, 32]"),
        ({"hidden_states": STATES[:, :0]}, "got torch.bfloat16 [40, 0]"),
        ({"hidden_states": STATES + torch.nan}, "must be finite, got NaN or Inf"),
        ({"hidden_states": STATES}, "must hold 4096 tokens"),
    ],
)
def test_bad_files_are_one_line(tensors, expected, tmp_path):
    path = tmp_path / "states.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    assert expected in failure("demo", "--input", str(path))


@pytest.mark.parametrize("package", ["typer", "rich", "safetensors"])
def test_without_its_packages_one_line_says_how_to_get_them(package, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("flash_csa.cli.")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(flash_csa.cli, name.split(".")[2], raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as stopped:
        flash_csa.cli.main()
    assert stopped.value.code == 2
    line = f"flash_csa: the command line needs {package}: pip install 'flash_csa[cli]'\n"
    assert capsys.readouterr() == ("", line)


def test_runs_as_a_module():
    command = [sys.executable, "-m", "flash_csa", "info", "--zzz"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "flash_csa: No such option: --zzz\n"
