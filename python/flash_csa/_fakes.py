"""What torch.compile traces: the ops' shape checks, from the same table that C++ checks with."""

import torch

from . import _C

_DTYPES = {
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "i32": torch.int32,
    "u8": torch.uint8,
}


def check_tensors(op: str, given: dict) -> None:
    """Raises ValueError unless dtypes, shapes and devices are as the op's signature says.

    Args:
        given: arguments by their names in the op's schema.
    """
    symbols = _bound(given)
    device = None
    for label, dtypes, shape, _, _ in _C.SIGNATURES[op]:
        value = given.get(label.replace(".", "_"))
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if tensor is None:
                continue
            device = device or tensor.device
            _check_tensor(f"flash_csa.{op}: {label}", dtypes, shape, tensor, symbols, device)


def by_name(op: str, args: tuple, kwargs: dict) -> dict:
    """All arguments of a call by their names in the op's schema, defaults included."""
    schema = getattr(torch.ops.flash_csa, op).default._schema.arguments
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    return defaults | dict(zip((a.name for a in schema), args, strict=False)) | kwargs


def _bound(given: dict) -> dict:
    """Symbols of shapes that have their value from an argument that is no tensor."""
    symbols = {name: given[arg] for name, arg in _INTS.items() if arg in given}
    if "ratios" in given:
        symbols["ratios"] = len(given["ratios"])
        symbols["sections"] = 1 + 4 * len(given["ratios"])
    for name, arg, field in (("C", "record", "data_bytes"), ("D", "pages_record", "dims")):
        if 0 <= given.get(arg, -1) < len(_C.RECORDS):
            symbols[name] = _C.RECORDS[given[arg]][field]
    return symbols


_INTS = {"K": "k", "m": "ratio", "window": "window"}


def _check_tensor(what: str, dtypes: str, shape: str, tensor, symbols: dict, device) -> None:
    wanted = [_DTYPES[d] for d in dtypes.split("|")]
    tokens = shape.split()

    def message() -> str:
        names = " or ".join(_name(d) for d in wanted)
        sizes = [_shown(t, i, tensor, len(tokens), symbols) for i, t in enumerate(tokens)]
        got = f"{_name(tensor.dtype)} {list(tensor.shape)}"
        return f"{what} must be {names} [{', '.join(sizes)}], got {got}"

    torch._check_value(tensor.dtype in wanted and tensor.dim() == len(tokens), message)
    new = {}
    for token, size in zip(tokens, tensor.shape, strict=True):
        plus = 1 if token.endswith("+1") else 0
        name = token.removesuffix("+1")
        if name.isdigit() or name in symbols:
            expected = int(name) if name.isdigit() else symbols[name]
            torch._check_value(size == expected + plus, message)
        elif name != "*":
            torch._check_value(size >= plus, message)
            new[name] = size - plus
    symbols |= new
    torch._check_value(
        tensor.device == device, lambda: f"{what} must be on {device}, got {tensor.device}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(token: str, dim: int, tensor, rank: int, symbols: dict) -> str:
    """A size of the expected shape: known, else as given, or by name where the rank is wrong."""
    name = token.removesuffix("+1")
    if name in symbols:
        return str(symbols[name] + (name != token))
    return token if name.isdigit() or tensor.dim() != rank else str(tensor.shape[dim])


def _register(op: str) -> None:
    def fake(*args, **kwargs) -> None:
        check_tensors(op, by_name(op, args, kwargs))

    # A second import registers again, which PyTorch before 2.13 refuses by default.
    torch.library.register_fake(f"flash_csa::{op}", fake, allow_override=True)


for _op in _C.SIGNATURES:
    _register(_op)
