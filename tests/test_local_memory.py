"""No kernel of the library spills registers or keeps an array in local memory."""

import os
import re
import shutil
import subprocess

import pytest

from flash_csa import _C


def test_no_kernel_uses_local_memory():
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = os.pathsep.join([os.environ["PATH"], os.path.join(toolkit, "bin")])
    cuobjdump = shutil.which("cuobjdump", path=path)
    if not _C.HAS_CUDA or cuobjdump is None:
        pytest.skip("no kernels, or no cuobjdump to read them")
    said = subprocess.run(
        [cuobjdump, "-res-usage", _C.__file__], capture_output=True, text=True, check=True
    ).stdout
    frames = re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    assert len(frames) > 20
    assert not [frame for frame in frames if frame[1:] != ("0", "0")]
