"""Rows of results: one JSON object a line, one line a case, written after every case."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .cases import CASES

KEYS = (
    *("case", "stage", "shape", "ours_us", "ours_samples", "peer", "peer_us", "peer_samples"),
    *("peers_us", "ratio", "best_peer", "best_peer_us", "best_ratio", "bytes", "flops", "gbps"),
    *("tflops", "ceiling", "fraction", "launches"),
    *("scratch_bytes", "dram_bytes", "instances", "page_size", "record", "device", "torch", "cuda"),
    *("clock", "power", "tree_core", "tree_common", "tree_stage", "dirty", "note", "date"),
)
TREES = ("tree_core", "tree_common", "tree_stage")

Row = dict[str, Any]


def load(path: Path, keys: Iterable[str] = ("case",)) -> dict[str, Row]:
    """Rows by case; of several for one case the last. No file: no rows.

    Raises:
        ValueError: a line is no object with `keys`; names file and line.
    """
    if not path.exists():
        return {}
    rows = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            row = _row(line)
            missing = [key for key in keys if key not in row]
            if missing:
                raise ValueError(f"{path}, line {number}: no row of results ({missing[0]} missing)")
            rows[row["case"]] = row
    return rows


def _row(line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def save(
    path: Path,
    rows: dict[str, Row],
    keys: Iterable[str] = KEYS,
    cases: Iterable[str] = CASES,
) -> None:
    """Writes the rows in the order of the cases; a crash leaves the old file or the new."""
    order = {name: number for number, name in enumerate(cases)}
    named = sorted(rows, key=lambda name: order.get(name, len(order)))
    lines = [json.dumps({key: rows[name][key] for key in keys}) for name in named]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    os.replace(partial, path)


def is_current(row: Row, trees: dict[str, str], device: str) -> bool:
    """Whether the row measured these sources on this kind of device."""
    return row["device"] == device and all(row[key] == trees[key] for key in TREES)


BEST_WAY = "peer padded further, us / ratio"  # heads a column of best_way


def best_way(row: Row) -> str:
    """Another way to call the peer that is faster: how, its microseconds and ratio; "" without."""
    if row["best_peer"] is None:
        return ""
    way = row["best_peer"].rpartition(", ")[2]
    return f"{way}: {row['best_peer_us']:,.1f} / {row['best_ratio']:.2f}"


def regressions(
    rows: Iterable[Row], old: dict[str, Row], tolerance: float
) -> list[tuple[str, float]]:
    """Cases whose time grew by more than `tolerance` (0.05: 5 %) on one device, and by how much."""
    found = []
    for row in rows:
        before = old.get(row["case"])
        if before is None or before["device"] != row["device"] or not before["ours_us"]:
            continue
        growth = row["ours_us"] / before["ours_us"] - 1
        if growth > tolerance and row["stage"]:
            found.append((row["case"], growth))
    return found
