"""One module for each axis: `measure(case, table)` and `HELD`, what was held fixed."""

from collections.abc import Callable
from dataclasses import dataclass

from ..case import Case
from ..table import Table
from . import (
    ceiling,
    decode,
    designs,
    group,
    index_precision,
    kv_format,
    pool,
    ratio,
    retrieval,
    reuse,
)


@dataclass(frozen=True)
class Experiment:
    """axis: the one that varies, see checks.AXES, or a word of its own. sets: inputs that it
    takes, None any. layers: of the group, None the default."""

    name: str
    title: str
    axis: str
    held: str
    measure: Callable[[Case, Table], None]
    sets: tuple[str, ...] | None = None
    layers: int | None = None


def _of(name: str, title: str, axis: str, module, **fields) -> Experiment:
    return Experiment(name, title, axis, module.HELD, module.measure, **fields)


EXPERIMENTS = {
    e.name: e
    for e in (
        _of("kv", "a. Format of main KV", "main KV", kv_format),
        _of("index", "b. Precision of the index", "index keys", index_precision),
        _of("pool", "c. Candidate pool", "pool", pool),
        _of("reuse", "d. Reuse across layers", "reuse", reuse),
        _of("group", "e. Length of a group", "reuse", group, layers=group.LAYERS),
        _of("ratio", "f. Compression", "compression", ratio),
        _of("ceiling", "g. Ceiling of selection", "selection", ceiling),
        _of("designs", "Three axes: bytes, work, quality", "design", designs),
        _of("retrieval", "Planted evidence", "selection", retrieval, sets=("planted",)),
        _of("decode", "After long decode", "main KV", decode),
    )
}
DEFAULT = ("kv", "index", "pool", "reuse", "retrieval")
