"""What torch.compile traces: the ops' shape checks, from the same table that C++ checks with."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from . import _C

_DTYPES = {
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "i32": torch.int32,
    "u8": torch.uint8,
}


class _Argument(NamedTuple):
    """A tensor of a call with its row of the signature table."""

    label: str
    dtypes: list[torch.dtype]
    tokens: list[str]
    written: bool
    tensor: Any  # None or something else where a tensor should be

    @property
    def well_typed(self) -> bool:
        t = self.tensor
        return (
            isinstance(t, torch.Tensor)
            and t.dtype in self.dtypes
            and t.dim() == len(self.tokens)
            and t.layout == torch.strided
        )

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Each symbol, or number, of the shape and the value that the tensor gives it."""
        for token, size in zip(self.tokens, self.tensor.shape, strict=True):
            # int: PyTorch 2.11 takes no bool from a symbolic size
            yield token.removesuffix("+1"), size - int(token.endswith("+1"))

    def fits(self, symbols: dict[str, int]) -> bool:
        return all(size == _expected(name, symbols, size) for name, size in self.sizes())

    def line(self, symbols: dict[str, int]) -> str:
        """What it must be; a free size is shown as given, or by name where the rank is wrong."""
        t = self.tensor
        given = t.shape if isinstance(t, torch.Tensor) and t.dim() == len(self.tokens) else None
        shown = []
        for dim, token in enumerate(self.tokens):
            name = token.removesuffix("+1")
            size = _expected(name, symbols, None)
            if size is None:
                shown.append(token if given is None else str(given[dim]))
            else:
                shown.append(str(size + (name != token)))
        names = " or ".join(_name(d) for d in self.dtypes)
        return f"{self.label} must be {names} [{', '.join(shown)}], got {describe(t)}"


def describe(value: Any) -> str:
    """A wrong value in a few words."""
    if value is None:
        return "None"
    if not isinstance(value, torch.Tensor):
        items = value if isinstance(value, list | tuple) and len(value) < 9 else (value,)
        plain = all(
            isinstance(item, float | str) or (isinstance(item, int) and abs(item) < 1 << 64)
            for item in items
        )
        text = f"{type(value).__name__} {value!r}" if plain else type(value).__name__
        return text if len(text) < 80 else text[:76] + " .."
    layout = "" if value.layout == torch.strided else f", {_name(value.layout)}"
    return f"{_name(value.dtype)} {list(value.shape)}{layout}"


def check_tensors(op: str, given: dict) -> None:
    """Raises ValueError unless dtypes, shapes and devices are as the op's signature says. Where
    arguments disagree, the line names the one that most others contradict.

    Args:
        given: arguments by their names in the op's schema.
    """
    arguments, symbols = list(_arguments(op, given)), _bound(given)
    known = dict(symbols)

    def blame(guilty: Callable[[], str]) -> Callable[[], str]:
        return lambda: f"flash_csa.{op}: {guilty()}"

    for a in arguments:
        typed = blame(lambda a=a: a.line(_majority(arguments, known)))
        torch._check_value(a.well_typed, typed)
    sized = blame(lambda: _odd_size(arguments, known))
    for a in arguments:
        for name, size in a.sizes():
            expected = _expected(name, symbols, None)
            torch._check_value(size >= 0 if expected is None else size == expected, sized)
            if name != "*":
                symbols.setdefault(name, size)
    placed = blame(lambda: _odd_device(arguments))
    for a in arguments:
        torch._check_value(a.tensor.device == arguments[0].tensor.device, placed)


def by_name(op: str, args: tuple, kwargs: dict) -> dict:
    """All arguments of a call by their names in the op's schema, defaults included."""
    schema = _schema(op)
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    return defaults | dict(zip((a.name for a in schema), args, strict=False)) | kwargs


def _schema(op: str) -> list:
    return getattr(torch.ops.flash_csa, op).default._schema.arguments


def _arguments(op: str, given: dict) -> Iterator[_Argument]:
    kinds = {a.name: str(a.type) for a in _schema(op)}
    for label, dtypes, shape, _, written in _C.SIGNATURES[op]:
        name = label.replace(".", "_")
        if name not in given or (given[name] is None and "Optional" in kinds[name]):
            continue
        row = label, [_DTYPES[d] for d in dtypes.split("|")], shape.split(), written
        for tensor in given[name] if "List" in kinds[name] else [given[name]]:
            yield _Argument(*row, tensor)


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


def _expected(name: str, symbols: dict[str, int], free):
    """The size that a number or a symbol stands for; `free` where it has no value yet."""
    return int(name) if name.isdigit() else symbols.get(name, free)


def _majority(arguments: list[_Argument], known: dict[str, int]) -> dict[str, int]:
    """The value of each symbol that most arguments give it: inputs first, then outputs, then the
    order of the table."""
    votes: dict[str, list[tuple[int, bool]]] = {}
    for a in arguments:
        for name, size in a.sizes() if a.well_typed else ():
            if name != "*" and not name.isdigit():
                votes.setdefault(name, []).append((int(size), a.written))
    return {name: _most(sizes) for name, sizes in votes.items()} | known


def _most(votes: list[tuple[Any, bool]]) -> Any:
    """The value with most votes, each (value, of an output)."""

    def weight(value) -> tuple[int, int]:
        return votes.count((value, False)), votes.count((value, True))

    return max((value for value, _ in votes), key=weight)


def _odd_size(arguments: list[_Argument], known: dict[str, int]) -> str:
    symbols = _majority(arguments, known)
    return next(a.line(symbols) for a in arguments if not a.fits(symbols))


def _odd_device(arguments: list[_Argument]) -> str:
    device = _most([(a.tensor.device, a.written) for a in arguments])
    odd = next(a for a in arguments if a.tensor.device != device)
    return f"{odd.label} must be on {device}, got {odd.tensor.device}"


def _name(dtype: torch.dtype | torch.layout) -> str:
    return str(dtype).removeprefix("torch.")


def _register(op: str) -> None:
    def fake(*args, **kwargs) -> None:
        check_tensors(op, by_name(op, args, kwargs))

    # A second import registers again, which PyTorch before 2.13 refuses by default.
    torch.library.register_fake(f"flash_csa::{op}", fake, allow_override=True)


for _op in _C.SIGNATURES:
    _register(_op)
