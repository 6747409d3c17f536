"""Inputs and comparisons that the tests of the reference module share."""

import json

import numpy as np
import torch

import golden
from flash_csa.reference import rope, step
from flash_csa.reference.compress import Compressor

STACKS = ["csa2_small", "csa2_short"]
RATIOS = [0, 2, 2, 1, 1, 1]
KV_SOURCE = [None, 1, 1, 3, 3, 3]  # layer whose records each layer reads
COMPRESSED = {"theta": 160000, "yarn": True}
WINDOW_ONLY = {"theta": 10000, "yarn": False}


def tensor(archive: dict, name: str) -> torch.Tensor:
    array = archive[name]
    return golden.bf16(array) if array.dtype == np.uint16 else torch.from_numpy(array)


def meta(archive: dict) -> dict:
    return json.loads(str(archive["meta"]))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_int = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[a.dtype]
    return a.dtype == b.dtype and torch.equal(a.view(as_int), b.view(as_int))


def assert_ulp(a: torch.Tensor, b: torch.Tensor, most: int = 2, share: float = 1e-4) -> None:
    """BF16 tensors at most `most` units in the last place apart, and that in a small share."""
    order = [
        torch.where(x < 0, -(x & 0x7FFF), x) for x in (t.view(torch.int16).int() for t in (a, b))
    ]
    distance = (order[0] - order[1]).abs()
    assert distance.max() <= most
    assert (distance > 0).float().mean() <= share


def table(positions: int = 300, ratio: int = 1) -> torch.Tensor:
    return rope.cos_sin_table(positions, **(COMPRESSED if ratio else WINDOW_ONLY))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def v4_like(ratio: int, tokens: int) -> tuple[Compressor, torch.Tensor, torch.Tensor | None]:
    """A compressor of each kind and its inputs."""
    width = 1024 if ratio == 4 else 512
    f32 = {"dtype": torch.float32}
    kv, gate = randn(tokens, width, seed=3, **f32), 3 * randn(tokens, width, seed=4, **f32)
    bias = randn(ratio, width, seed=5, **f32) if ratio >= 4 else None
    stage = Compressor(ratio, 1 + randn(512, seed=6, **f32) / 8, 1e-6, bias, ratio == 4)
    return (stage, kv.bfloat16(), None) if ratio == 1 else (stage, kv, gate)


def layer_rows(archive: dict, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = tensor(archive, "rows").long()
    return rows, step.visible_entries(rows, RATIOS[layer])


def sqrt_fp32(x: torch.Tensor) -> torch.Tensor:
    """The FP32 square root, rounded once. PyTorch's own comes from the MKL, which misses it by a
    last bit on some processors."""
    return x.double().sqrt().float()
