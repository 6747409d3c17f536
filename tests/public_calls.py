"""The calls of `op_calls` as a user makes them: by the public functions, with their structs."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch

import flash_csa as fc
from op_calls import CALLS, Call, Scene

NAMES = {record.id: record.name for record in fc.RECORDS.values()}
Path = tuple[str | int, ...]  # of a parameter, and of fields and elements inside it


@dataclass(frozen=True)
class PublicCall:
    """A function of the package and its arguments by name."""

    op: str
    arguments: dict[str, Any] = field(repr=False)

    def __call__(self) -> Any:
        return getattr(fc, self.op)(**self.arguments)

    def leaves(self) -> Iterator[tuple[Path, Any]]:
        """Everything that can be wrong by itself: arguments, and what they are made of."""
        yield from _leaves(self.arguments, ())

    def but(self, path: Path, value: Any) -> "PublicCall":
        """The same call with another value in one place."""
        return replace(self, arguments=_put(self.arguments, path, value))

    def label(self, path: Path) -> str:
        """What messages call the value at `path`."""
        text = ".".join(map(str, path))
        for old, new in _LABELS.get(self.op, {}).items():
            text = text.replace(old, new)
        return text.replace("pages.data", "pages").replace(".data", ".pages")


_SELECTED = {"out.0": "out", "out.1": "pool_out"}
_POOLED = {"out.": "pool_out."}
_DEROTATE = {"derotate.0": "derotate.positions", "derotate.1": "derotate.cos_sin"}
_CONTIGUOUS = ("block_table", "row_request", "n_vis")
_LABELS = {
    "attend": {
        **_DEROTATE,
        **{f"contiguous.{i}": f"contiguous.{name}" for i, name in enumerate(_CONTIGUOUS)},
        "window_pages.data": "window.pages",
    },
    "merge": _DEROTATE,
    "select": _SELECTED,
    "index_select": _SELECTED,
    "normalize_pool": _POOLED,
    "merge_pools": _POOLED,
    "step_slots": {"out.": "", "tables.0": "tables", "tables.1": "tables"},
}


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if path:
        yield path, value
    items = []
    if is_dataclass(value):
        items = [(field.name, getattr(value, field.name)) for field in fields(value)]
    elif isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, tuple | list):
        items = list(enumerate(value))
    for key, item in items:
        yield from _leaves(item, (*path, key))


def _put(owner: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    key, *rest = path
    if is_dataclass(owner):
        return replace(owner, **{key: _put(getattr(owner, key), tuple(rest), value)})
    changed = dict(owner) if isinstance(owner, dict) else list(owner)
    changed[key] = _put(changed[key], tuple(rest), value)
    return tuple(changed) if isinstance(owner, tuple) else changed


def public_call(name: str, scene: Scene, *, allocate: bool = False) -> PublicCall:
    """`CALLS[name]`; with `allocate` the function makes its outputs and workspace."""
    call = CALLS[name](scene)
    structs = _Structs(call)
    unused = {"out", "workspace"} if allocate else {"dtype"}
    if call.op == "merge_pools" and not allocate:
        unused.add("pool_blocks")
    parameters = inspect.signature(getattr(fc, call.op)).parameters
    values = {name: structs(name) for name in parameters if name not in unused}
    return PublicCall(call.op, {name: v for name, v in values.items() if v is not None})


class _Structs:
    """The arguments of a public function, from those of the op's schema."""

    def __init__(self, call: Call) -> None:
        self.op, self.args = call.op, call.args

    def __call__(self, parameter: str) -> Any:
        build = getattr(self, parameter, None)
        return build() if build else self.args.get(parameter)

    def _all(self, cls: type, prefix: str) -> Any:
        """A struct whose fields are the arguments `prefix`_field; None where these are absent."""
        given = {field.name: self.args.get(f"{prefix}_{field.name}") for field in fields(cls)}
        return cls(**given) if any(value is not None for value in given.values()) else None

    def _pages(self, name: str, ints: str) -> fc.Pages | None:
        data = self.args.get(name)
        if data is None:
            return None
        record, page_size = self.args[f"{ints}_record"], self.args[f"{ints}_page_size"]
        return fc.Pages(data, NAMES[record], page_size)

    def _tuple(self, *names: str) -> tuple | None:
        values = tuple(self.args.get(name) for name in names)
        return None if values[0] is None else values

    def batch(self) -> fc.Batch:
        return self._all(fc.Batch, "batch")

    def pages(self) -> fc.Pages:
        return self._pages("pages", "pages")

    def main(self) -> fc.Pages | None:
        return self._pages("main_pages", "main")

    def index(self) -> fc.Pages | None:
        return self._pages("index_pages", "index")

    def window_pages(self) -> fc.Pages | None:
        return self._pages("window_pages", "window")

    def window(self) -> Any:
        if self.op == "rope_store":
            return self.window_pages()
        return self.args["window"] if "window" in self.args else self._all(fc.Window, "window")

    def query(self) -> fc.IndexQuery:
        return self._all(fc.IndexQuery, "query")

    def selection(self) -> fc.Selection | None:
        return self._all(fc.Selection, "selection")

    def pool(self) -> fc.Pool | None:
        return self._all(fc.Pool, "pool")

    def tail(self) -> fc.Tail | None:
        return self._all(fc.Tail, "tail")

    def contiguous(self) -> tuple | None:
        return self._tuple(*(f"contiguous_{name}" for name in _CONTIGUOUS))

    def derotate(self) -> tuple | None:
        return self._tuple("derotate_positions", "derotate_cos_sin")

    def dtype(self) -> torch.dtype:
        return self.args["out"].dtype

    def record(self) -> str | None:
        return NAMES[self.args["record"]] if "record" in self.args else None

    def pool_blocks(self) -> int | None:
        built = self.args.get("pool_out_blocks")
        if self.op == "schedule":
            return self.args["pool_blocks"]
        return None if built is None else built.shape[1]

    def out(self) -> Any:
        built = self._all(fc.Pool, "pool_out")
        if self.op in ("select", "index_select"):
            return self._all(fc.Selection, "out"), built
        if self.op == "step_slots":
            lists = self._all(fc.Window, "lists")
            rest = {name: self.args[name] for name in ("window_store", "entry_slots", "n_vis")}
            return fc.StepSlots(lists=lists, **rest)
        if self.op == "merge_selections":
            return self._all(fc.Selection, "out")
        return self._all(fc.IndexQuery, "out") or built or self.args.get("out")


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors inside a value."""
    found = [leaf for _, leaf in _leaves({"": value}, ())]
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
