"""Golden tensors from independent implementations: where they are and how to read them."""

import functools
import os
from pathlib import Path

import numpy as np
import pytest
import torch

_HERE = Path(__file__).resolve().parent
_PLACES = (
    Path(os.environ.get("FLASH_CSA_GOLDEN", _HERE / "data")),
    _HERE / "data",
    _HERE.parent.parent / "shared" / "golden",
)


@functools.cache
def load(name: str) -> dict[str, np.ndarray]:
    """All arrays of golden file `name` (without .npz); skips the test where the file is absent."""
    for place in _PLACES:
        if (place / f"{name}.npz").exists():
            with np.load(place / f"{name}.npz") as archive:
                return {key: archive[key] for key in archive.files}
    pytest.skip(f"golden file {name}.npz not found")


def bf16(array: np.ndarray) -> torch.Tensor:
    """BF16 tensor from the uint16 bit patterns in which golden files store it."""
    return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
