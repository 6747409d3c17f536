"""README is true: its tables come from the code, its example runs, its commands exist."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_tables_are_rendered_from_the_code():
    render = runpy.run_path(str(ROOT / "docs" / "render.py"))
    for path in render["BLOCKS"]:
        assert render["render"](path) == path.read_text(), "run: python docs/render.py"


def test_example_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) == 1
    exec(compile(blocks[0], "README.md", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([1000, 8, 512]) row 999 reads 512 of 1000\n"
    code = [line for line in blocks[0].splitlines() if line.strip()]
    assert len(code) <= 30


@pytest.mark.parametrize("target", re.findall(r"^make (\w+) ", README, re.M))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


def test_linked_files_exist():
    for path in re.findall(r"`((?:docs|tests|bench)/[\w./]+)`", README):
        assert (ROOT / path).exists(), path
