"""What torch.compile traces: the ops' shape checks, from the same table that C++ checks with."""

import torch

from . import _C

_DTYPES = {
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "i32": torch.int32,
    "u8": torch.uint8,
}


def _check(op: str, label: str, dtypes: str, shape: str, tensor, symbols: dict) -> None:
    wanted = [_DTYPES[d] for d in dtypes.split("|")]
    tokens = shape.split()
    got = f"got {tensor.dtype} {list(tensor.shape)}"
    message = f"flash_csa.{op}: {label} must be {dtypes} [{', '.join(tokens)}], {got}"
    torch._check_value(tensor.dtype in wanted and tensor.dim() == len(tokens), lambda: message)
    for token, size in zip(tokens, tensor.shape, strict=True):
        if token == "*":
            continue
        plus = 1 if token.endswith("+1") else 0
        name = token.removesuffix("+1")
        expected = int(name) if name.isdigit() else symbols.setdefault(name, size - plus)
        torch._check_value(size == expected + plus, lambda: message)


def _register(op: str, signature: list[tuple]) -> None:
    names = [a.name for a in getattr(torch.ops.flash_csa, op).default._schema.arguments]
    by_name = {label.replace(".", "_"): row for row in signature for label in row[:1]}

    def fake(*args, **kwargs) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        symbols: dict = {}
        for name in names:
            value = given.get(name)
            if name not in by_name or value is None:
                continue
            label, dtypes, shape, _, _ = by_name[name]
            for tensor in value if isinstance(value, list | tuple) else [value]:
                _check(op, label, dtypes, shape, tensor, symbols)

    torch.library.register_fake(f"flash_csa::{op}", fake)


for _op, _signature in _C.SIGNATURES.items():
    _register(_op, _signature)
