"""The three-axis table: cache bytes, index work and quality of four designs on the same inputs."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from ..backends import Stored
from ..case import Case
from ..formats import (
    DSA_MAIN,
    INDEX_FP4,
    INDEX_FP8,
    MAIN_FP4,
    MIXED_FP8,
    Variant,
)
from ..metrics import answered, found, relative_error
from ..planted import POOL_BLOCK
from ..table import Table
from .pool import blocks_of
from .reuse import pool_share

HELD = (
    "inputs, window FP8, k; every design with its own records, index format and selections; "
    "expected: attention of the layer to every token, BF16"
)
REFRESH = 4  # layers between two refreshes of the hybrid's index
HCA_RATIO = 128


@dataclass(frozen=True)
class Part:
    """One layer of a design: where its entries and its selection come from.

    mode: "full" and "reindex" score; "reuse" takes the selection of the layer before; "all" reads
    every entry. own_kv, own_keys: the layer adds records of its own to the cache.
    """

    ratio: int
    main: Variant
    index: Variant
    mode: str
    own_kv: bool = True

    @property
    def bytes_per_token(self) -> Fraction:
        """What the layer adds to the global cache."""
        keys = self.index.bytes if self.mode == "full" else 0
        return Fraction((self.main.bytes if self.own_kv else 0) + keys, self.ratio)


def designs(modes: tuple[str, ...]) -> dict[str, list[Part]]:
    """The layers of each design, for a group that CSA2 runs as `modes`."""
    numbers = range(len(modes))
    refreshed = ["full" if n % REFRESH == 0 else "reuse" for n in numbers]
    csa = Part(4, MIXED_FP8, INDEX_FP4, "full")
    hca = Part(HCA_RATIO, MIXED_FP8, INDEX_FP4, "all")
    return {
        **{
            f"CSA2, ratio {ratio}": [
                Part(ratio, MAIN_FP4, INDEX_FP4, mode, own_kv=mode == "full") for mode in modes
            ]
            for ratio in (1, 2)
        },
        "V4 CSA + HCA": [hca if n % 2 else csa for n in numbers],
        f"index refreshed every {REFRESH} layers": [
            Part(1, DSA_MAIN, INDEX_FP8, mode) for mode in refreshed
        ],
        "DSA": [Part(1, DSA_MAIN, INDEX_FP8, "full") for _ in numbers],
    }


def measure(case: Case, table: Table) -> None:
    for name, parts in designs(case.inputs.modes).items():
        if not all(case.backend.supports(v) for p in parts for v in (p.main, p.index)):
            continue
        work = [_comparisons(case, part) for part in parts]
        facts = {
            "bytes_per_token_and_layer": float(sum(p.bytes_per_token for p in parts) / len(parts)),
            "comparisons_per_query_and_layer": sum(work) / len(work),
        }
        for layer, (part, main, lists) in enumerate(_run(case, parts)):
            out = case.attend(layer, main, lists)
            error = relative_error(out, case.dense(layer))
            table.put(case, name, "output error", layer, error, **facts)
            evidence = case.inputs.evidence
            if evidence is not None:
                table.put(case, name, "answered", layer, answered(out, evidence))
                held = found(lists, evidence.needles, part.ratio, case.size(part.ratio))
                table.put(case, name, "found", layer, held)


def _run(case: Case, parts: list[Part]) -> Iterator[tuple[Part, Stored, Tensor]]:
    """Records and lists i64 [Q, ...] of each layer."""
    backend = case.backend
    lists = pool = None
    for layer, part in enumerate(parts):
        where = case.where(part.ratio)
        main = case.main(part.main, part.ratio)
        if part.mode == "all":
            every = backend.select(-case.mass(layer, part.ratio), where, case.size(part.ratio))
            yield part, main, every
            continue
        if part.mode == "reuse":
            lists = backend.reuse(lists)
        else:
            scores = case.scores(layer, part.index, part.ratio)
            inside = pool if part.mode == "reindex" else None
            lists = backend.select(scores, where, case.k, inside, POOL_BLOCK)
            if pool is None and "reindex" in (p.mode for p in parts):
                blocks = blocks_of(case, pool_share(case.size()) / part.ratio, POOL_BLOCK)
                pool = backend.pool(scores, where, blocks, POOL_BLOCK)
        yield part, main, lists


def _comparisons(case: Case, part: Part) -> float:
    """Index keys that one query at the end of the context is compared with."""
    if part.mode in ("reuse", "all"):
        return 0
    share = pool_share(case.size()) if part.mode == "reindex" else 1
    return share * case.size(part.ratio)
