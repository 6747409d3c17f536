"""Says in one line what is wrong with a call, where an argument is of a kind that the op never sees
or PyTorch refuses in words of its own: None, a tensor in the place of `Pages`, a float for an int.

A call that succeeds pays for one more frame. One that raises is looked at again, with its arguments
in hand: against the annotations of the function, then against the op's signature.
"""

import functools
import numbers
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar

import torch

from . import _C
from ._fakes import check_tensors, describe

INT32_MAX = (1 << 31) - 1
P = ParamSpec("P")
R = TypeVar("R")
# Lines of the op that may be about another argument than the one that is wrong.
_OF_TENSORS = re.compile(r"flash_csa\.\w+: \S+ must be (on |[\w ]+ \[.*, got (None|[\w ]+ \[))")


def explained(**limits: tuple[int, int]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator of public functions.

    Args:
        limits: least and most of ints by which the function allocates before the op checks them.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                line = _line(function, limits, args, kwargs, str(error))
                if line is None:
                    raise
                raise ValueError(line) from None

        return call

    return decorate


def _line(function: Callable, limits: dict, args: tuple, kwargs: dict, error: str) -> str | None:
    """What to say instead of `error`; None if there is nothing better."""
    try:
        bound = signature(function).bind(*args, **kwargs)
    except TypeError:  # its text names the keyword
        return None
    where = f"flash_csa.{function.__qualname__.removesuffix('.__init__')}"
    hints = _hints(function)
    is_op = function.__qualname__ in _C.SIGNATURES  # and no method of that name
    for name, value, hint in _annotated(function, bound.arguments, hints):
        if hint is torch.Tensor and not is_op and not isinstance(value, torch.Tensor):
            return f"{where}: {name} must be a tensor, got {describe(value)}"
        for field, problem in _wrong(value, hint, name):
            return f"{where}: {field} must be {problem}"
    for name, (low, high) in limits.items():
        value = bound.arguments.get(name, low)
        if not low <= value <= high:
            return f"{where}: {name} must be in [{low}, {high}], got {value}"
    device = bound.arguments.get("device", "cpu")
    if not _is_there(device):
        return f"{where}: device must be one that is there, got {device}"
    said = error.startswith("flash_csa.")
    if is_op and (not error.startswith(f"{where}: ") or _OF_TENSORS.match(error)):
        try:
            check_tensors(function.__name__, _flat(function, bound.arguments))
        except ValueError as found:
            return str(found)
    absent = [field for name, value in bound.arguments.items() for field in _absent(value, name)]
    return f"{where}: {absent[0]} must be a tensor, got None" if absent and not said else None


def _is_there(device: Any) -> bool:
    """Not asked of a GPU itself: after a fault of a kernel every answer would be its error."""
    try:
        place = torch.device(device)
        if place.type != "cuda":
            torch.empty(0, device=place)
    except Exception:  # of several types: no such kind, a PyTorch without it
        return False
    number = place.index or 0
    return place.type != "cuda" or (
        torch.cuda.is_available() and number < torch.cuda.device_count()
    )


def _annotated(
    function: Callable, arguments: dict[str, Any], hints: dict[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and annotation of each argument that has one."""
    for name, value in arguments.items():
        if name not in hints:
            continue
        spread = signature(function).parameters[name].kind is Parameter.VAR_KEYWORD
        for key, item in value.items() if spread else [(name, value)]:
            yield key, item, hints[name]


def _absent(owner: Any, name: str) -> list[str]:
    """The fields of a dataclass that are None in the place of a tensor."""
    members = fields(owner) if is_dataclass(owner) and not isinstance(owner, type) else ()
    tensors = [field.name for field in members if field.type is torch.Tensor]
    return [f"{name}.{field}" for field in tensors if getattr(owner, field) is None]


def _hints(function: Callable) -> dict[str, Any]:
    names = vars(sys.modules[__package__])  # a module may name a class that it cannot import
    return typing.get_type_hints(function, {**names, **function.__globals__})


def _wrong(value: Any, hint: Any, name: str) -> Iterator[tuple[str, str]]:
    """(argument, "what it must be, got what it is") of a value that is not of the kind `hint`."""
    if _fits(value, hint):
        yield from _wrong_fields(value, f"{name}.")
    else:
        yield name, f"{_kind(hint)}, got {describe(value)}"


def _wrong_fields(value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """The same of the fields of a dataclass; tensors are left to the signature."""
    if type(value).__module__.split(".")[0] != __package__ or not is_dataclass(value):
        return
    hints = typing.get_type_hints(type(value))
    for field in fields(value):
        yield from _wrong(getattr(value, field.name), hints[field.name], prefix + field.name)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if _is_union(hint):
        return any(_fits(value, option) for option in inner)
    if origin is Any or origin is torch.Tensor:  # check_tensors says more of a tensor
        return True
    if origin is Sequence or Ellipsis in inner:
        listed = not isinstance(value, torch.Tensor | str | dict) and hasattr(value, "__len__")
        return listed and all(_fits(item, inner[0]) for item in value)
    if origin is tuple:
        listed = isinstance(value, tuple | list) and len(value) == len(inner)
        return listed and all(map(_fits, value, inner))
    if origin is int:
        return isinstance(value, numbers.Integral | torch.SymInt) and abs(value) < 1 << 63
    if origin is float:
        return isinstance(value, numbers.Real | torch.SymFloat)
    return isinstance(value, origin) if isinstance(origin, type) else True


def _kind(hint: Any) -> str:
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint is type(None):
        return "None"
    if _is_union(hint):
        return " or ".join(_kind(option) for option in inner)
    if origin is Sequence or Ellipsis in inner:
        return f"a list of {_kind(inner[0])}"
    if origin is tuple:
        return f"({', '.join(_kind(item) for item in inner)})"
    return "int64" if origin is int else origin.__name__


def _flat(function: Callable, arguments: dict[str, Any]) -> dict[str, Any]:
    """The tensors that a call gives to its op, and the numbers that decide their shapes, by the
    names of the op's schema; without those that the function allocates."""
    from .records import RECORDS, Pages
    from .select import Pool
    from .step import StepSlots

    owners = {name: value for name, value in arguments.items() if value is not None}
    required = signature(function).parameters.values()
    owners |= {p.name: arguments[p.name] for p in required if p.default is Parameter.empty}
    flat = {name: owners[name] for name in ("k", "ratio", "ratios") if name in owners}
    if isinstance(owners.get("window"), int):
        flat["window"] = owners["window"]
    if "record" in owners:
        flat["record"] = RECORDS[owners["record"]].id
    if isinstance(owners.get("pages"), Pages):
        flat["pages_record"] = RECORDS[owners["pages"].record].id
    out = owners.get("out")
    if isinstance(out, StepSlots):
        owners |= vars(out)
    if isinstance(out, Pool):
        owners["pool_out"] = out
    labels = [row[0] for row in _C.SIGNATURES[function.__name__]]
    if "pool_out.blocks" in labels and isinstance(out, tuple | list):
        owners["out"], owners["pool_out"] = out
    for label in labels:
        head, _, field = label.partition(".")
        if field == "pages" and f"{head}_pages" in owners:
            head = f"{head}_pages"
        if head in owners:
            members = [other for other in labels if other.startswith(f"{head}.")]
            flat[label.replace(".", "_")] = _member(owners[head], label, field, members)
    return flat


def _member(owner: Any, label: str, field: str, members: list[str]) -> Any:
    """What a label names of an argument: itself, a field of it, or its place in a tuple."""
    from .records import Pages

    if isinstance(owner, Pages):
        return owner.data
    if field and isinstance(owner, tuple | list):
        return owner[members.index(label)]
    return getattr(owner, field, None) if field else owner
