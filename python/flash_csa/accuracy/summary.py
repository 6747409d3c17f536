"""What a report says, before it is laid out: views of results, context lengths, kernel error."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..configs import V41_FLASH
from .checks import AXES

DECLARED = V41_FLASH["max_position_embeddings"]
EFFECTIVE = 0.9  # share of rows that must be answered

# Experiment: the metrics of its table.
SHOWN = {
    "kv": ("output error", "value error"),
    "index": ("recall", "Jaccard", "mass covered", "output error", "boundary gap"),
    "pool": ("recall", "pool recall@64", "pool recall@256", "pool recall@1024", "mass covered"),
    "reuse": ("recall", "mass covered", "output error"),
    "group": ("recall", "mass covered"),
    "ratio": ("output error", "mass covered"),
    "ceiling": ("mass covered", "output error"),
    "designs": ("output error", "answered", "found"),
    "retrieval": ("answered", "found", "decoy wins"),
    "decode": ("output error",),
}
NOT_COVERED = (
    "Not covered: padded rows, NaN inputs, schedules, bounded replay, batch invariance; see "
    "docs/accuracy.md, Kernel error."
)
FACTS = {
    "bytes": "B/entry",
    "bytes_per_token_and_layer": "B/token/layer",
    "comparisons_per_query_and_layer": "comparisons/layer",
    "positions": "pool",
}


def failures(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The checks that fail, in the order of the data flow: a fault lies at the first one's axis."""
    return [check for check in ordered(run) if not check["holds"]]


def ordered(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All checks in the order of the data flow."""
    return sorted(run["checks"], key=lambda check: AXES.index(check["axis"]))


def stages(run: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """In the order of the data flow: axis, number of its checks that hold, number of all; of the
    formulas' own only where there is no other back end."""
    kernels = [check for check in run["checks"] if check["backend"] != "formula"]
    checks = kernels or run["checks"]
    axes = [check["axis"] for check in checks]
    held = [check["axis"] for check in checks if check["holds"]]
    return [(axis, held.count(axis), axes.count(axis)) for axis in AXES if axis in axes]


def headline(run: Mapping[str, Any]) -> str:
    """How many checks hold, of kernels and of the formulas alone, where a fault lies, and what
    that does not cover."""
    back_ends = dict.fromkeys(check["backend"] for check in run["checks"])
    parts = []
    for name in sorted(back_ends, key=lambda name: name == "formula"):
        held = [check["holds"] for check in run["checks"] if check["backend"] == name]
        of = "of the formulas alone" if name == "formula" else f"of {name}"
        parts.append(f"{sum(held)} of {len(held)} checks {of} hold")
    failed = failures(run)
    if failed:
        parts.append(f"first to fail in the order of the data flow: {failed[0]['axis']}")
    if back_ends.keys() - {"formula"}:
        parts[0] += f" ({run['instructions']})"
        return "; ".join(parts) + f". {NOT_COVERED}"
    return "; ".join(parts) + "."


def views(run: Mapping[str, Any]) -> list[tuple[str, str, int, str]]:
    """Experiment, input, context and back end of each table, in order of appearance."""
    keys = ("experiment", "input", "context", "backend")
    return list(dict.fromkeys(tuple(r[k] for k in keys) for r in run["results"]))


def pick(run: Mapping[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """Results whose fields are as wanted."""
    return [r for r in run["results"] if all(r[k] == v for k, v in wanted.items())]


def rows(run: Mapping[str, Any], view: tuple, bucket: str = "all") -> list[dict[str, Any]]:
    """Of one view: variant, facts, and the result of each metric."""
    keys = dict(zip(("experiment", "input", "context", "backend"), view, strict=True))
    made: dict[str, dict[str, Any]] = {}
    for result in pick(run, **keys, bucket=bucket):
        row = made.setdefault(
            result["variant"], {"variant": result["variant"], "facts": result["facts"]}
        )
        row[result["metric"]] = result
    return list(made.values())


def lengths(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """By variant and back end of planted evidence: declared, failure-free and effective length.

    Failure-free: the longest context measured up to which every row is answered; effective: up to
    which at least `EFFECTIVE` of them are. 0: not even the shortest.
    """
    answered = pick(run, experiment="retrieval", metric="answered", bucket="all")
    found = []
    for variant, backend in dict.fromkeys((r["variant"], r["backend"]) for r in answered):
        shares = sorted(
            (r["context"], r["value"])
            for r in answered
            if (r["variant"], r["backend"]) == (variant, backend)
        )
        found.append(
            {
                "variant": variant,
                "backend": backend,
                "declared": DECLARED,
                "longest_measured": shares[-1][0],
                "failure_free": _longest(shares, 1.0),
                "effective": _longest(shares, EFFECTIVE),
            }
        )
    return found


def _longest(shares: Sequence[tuple[int, float]], least: float) -> int:
    longest = 0
    for context, share in shares:
        if share < least:
            break
        longest = context
    return longest


def kernel_errors(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Results of other back ends beside those of the formulas: format error and kernel error."""
    keys = ("experiment", "input", "context", "variant", "metric", "bucket")
    formula = {tuple(r[k] for k in keys): r for r in run["results"] if r["backend"] == "formula"}
    return [
        {
            **{k: r[k] for k in keys},
            "backend": r["backend"],
            "formula": formula[key]["value"],
            "value": r["value"],
            "difference": r["value"] - formula[key]["value"],
        }
        for r in run["results"]
        if r["backend"] != "formula" and (key := tuple(r[k] for k in keys)) in formula
    ]


def number(value: float | None) -> str:
    """Four digits, or none."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def estimate(result: Mapping[str, Any]) -> str:
    """Value and half of its interval."""
    if result["low"] is None or result["high"] is None:
        return number(result["value"])
    return f"{number(result['value'])} ±{(result['high'] - result['low']) / 2:.1g}"
