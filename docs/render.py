"""Writes tables of documents from the code and the committed rows: those of the README and of
traffic.md by name, and in every document `rows GLOB ...`, of such cases of the benchmark.
`--check` only compares. `--accuracy` first takes the results.json of a run of `python -m flash_csa
accuracy`, without its finer buckets.

usage: python docs/render.py [--check] [--accuracy results.json]
"""

import argparse
import json
import re
import sys
from fnmatch import fnmatch
from pathlib import Path

from flash_csa import _C, RECORDS, accounting
from flash_csa.accuracy import summary

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench import provenance, results  # noqa: E402
from bench.cases import CASES  # noqa: E402

README = ROOT / "README.md"
TRAFFIC = ROOT / "docs" / "traffic.md"
H200 = ROOT / "bench" / "results" / "h200.jsonl"
ACCURACY = ROOT / "bench" / "results" / "accuracy.json"
# Experiment, variant, metric, and what the README calls the line.
ACCURACY_LINES = (
    ("kv", "E4M3 / UE8M0 per 32", "output error", "main KV FP8, 528 B"),
    ("kv", "E4M3 / UE8M0 per 64 + 64 BF16", "output error", "main KV FP8 with BF16 RoPE, 584 B"),
    ("kv", "E2M1 / E4M3 per 16", "output error", "main KV FP4, 288 B (V4.1)"),
    ("kv", "E2M1 / UE8M0 per 16", "output error", "main KV FP4 with UE8M0 scales, 288 B"),
    ("kv", "E2M1 / E4M3 per 16 + 64 BF16", "output error", "main KV FP4 with BF16 RoPE, 380 B"),
    ("index", "BF16 rounded", "differing slots", "scores rounded to BF16"),
    ("index", "FP8", "differing slots", "index FP8, 132 B"),
    ("index", "FP4", "differing slots", "index FP4, 68 B (V4.1)"),
    ("index", "FP4", "output error", "index FP4, 68 B (V4.1)"),
    ("pool", "1/2 of the context, blocks of 8", "recall", "pool of half the context"),
    ("pool", "1/4 of the context, blocks of 8", "recall", "pool of a quarter"),
    ("reuse", "Reuse only", "output error", "7 layers reuse the first one's selection"),
    ("reuse", "as planned", "output error", "the same with a Reindex in the middle"),
)
USES = {
    "MainFp4": "V4.1 compressed KV",
    "WindowFp8": "V4.1 window KV",
    "IndexFp4": "index keys and queries",
    "MixedFp8": "V4 compressed and window KV, 64 RoPE dims in BF16",
    "IndexFp8": "index keys of earlier Hopper stacks",
}


def table(header: list[str], rows: list[list[str]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def records() -> str:
    """The record table."""
    rows = [
        [
            f"`{r.name}`",
            f"{r.coded_dims} {r.element}"
            + (f" + {r.dims - r.coded_dims} BF16" if r.dims > r.coded_dims else ""),
            f"{r.scale_kind} per {r.group}",
            str(r.bytes),
            r.page_order,
            USES[r.name],
        ]
        for r in RECORDS.values()
    ]
    return table(["record", "values", "scale", "bytes", "page order", "used for"], rows)


def cache_bytes() -> str:
    """Bytes per token of the caches compared."""
    rows = [[name, f"{float(size):,.10g}"] for name, size in accounting.comparison()]
    return table(["cache", "bytes/token"], rows)


def support() -> str:
    """What each op takes."""
    names = [name for name in _C.SIGNATURES if name != "probe"]
    rows = [
        ["ops", ", ".join(f"`{name}`" for name in names)],
        ["ratios", "0 (window only), 1, 2, 4 (overlapping), 128"],
        [
            "records",
            "`store`, `load`: all; main: MainFp4, WindowFp8, MixedFp8; index: IndexFp4, IndexFp8",
        ],
        ["page sizes", f"1 to {_C.MAX_PAGE_SIZE}, page strides any multiple of 16 bytes"],
        [
            "attention heads",
            "any number, any head stride; padded to 8, 16, 32 or blocks of 64 inside",
        ],
        ["index heads", f"1 to {_C.MAX_INDEX_HEADS}"],
        ["top-k", f"1 to {_C.MAX_TOP_K:,}; pools of blocks of 8"],
        [
            "PyTorch, Python",
            "2.11 and later, CPU-only or CUDA; CPython 3.10 and later; one library",
        ],
    ]
    return table(["what", "supported"], rows)


STALE = "\n\n† measured before the last change of its kernel."
BAR = (
    "\n\nA bar is the ratio that was set before the kernels were designed; "
    "[README](../README.md#results) says how a case's name and a ceiling are read."
)


def is_current(row: dict) -> bool:
    """Whether a row's kernel is the one in the tree."""
    return all(row[key] == tree for key, tree in provenance.trees(row["stage"]).items())


def figures(row: dict) -> tuple[str, str, str, str, str, str, str]:
    """A row's case, with a dagger where the kernel has changed since; our time and the peer's, us;
    their ratio, the bar, a faster way to call the peer, and the fraction of the ceiling that binds.
    """
    peer = "" if row["peer_us"] is None else f"{row['peer_us']:,.1f}"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    fraction = "" if row["fraction"] is None else f"{100 * row['fraction']:.0f} %"
    ceiling = f"{fraction}, {row['ceiling']}" if row["ceiling"] else fraction
    name = f"`{row['case']}`{'' if is_current(row) else ' †'}"
    return name, f"{row['ours_us']:,.1f}", peer, ratio, bar(row), results.best_way(row), ceiling


def bar(row: dict) -> str:
    """The ratio that is asked for, and whether it is missed."""
    must = CASES[row["case"]].must
    if must is None:
        return ""
    missed = row["ratio"] is not None and row["ratio"] < must
    return f"{must:g}, missed" if missed else f"{must:g}"


def measured(globs: list[str]) -> list[dict]:
    """The committed rows of cases with a stage whose names match."""
    return [
        row
        for row in results.load(H200).values()
        if row["stage"]
        and row["ours_us"] is not None
        and any(fnmatch(row["case"], glob) for glob in globs)
    ]


def padded_table(header: list[str], lines: list[list[str]]) -> str:
    """A table whose column results.BEST_WAY is left out where it is empty."""
    at = header.index(results.BEST_WAY)
    if not any(line[at] for line in lines):
        header, *lines = (line[:at] + line[at + 1 :] for line in (header, *lines))
    return table(header, lines)


def bench_table() -> str:
    """Ours beside the peer."""
    rows = measured(["*"])
    if not rows:
        return "No results yet; `make gpu-bench` writes them."
    lines = []
    for row in rows:
        name, ours, peer, *rest = figures(row)
        lines.append([name, ours, peer, row["peer"] or "", *rest])
    header = ["case", "ours, us", "peer, us", "peer", "ratio", "bar"]
    header += [results.BEST_WAY, "of the ceiling"]
    return padded_table(header, lines) + ("" if all(map(is_current, rows)) else STALE)


def rows_table(globs: list[str]) -> str:
    """Some cases beside the peer, and what their names, bars and ceilings are."""
    rows = measured(globs)
    assert rows, globs
    lines = [list(figures(row)) for row in rows]
    header = ["case", "us", "peer, us", "ratio", "bar", results.BEST_WAY, "of the ceiling"]
    return padded_table(header, lines) + ("" if all(map(is_current, rows)) else STALE) + BAR


def dram_table() -> str:
    """Bytes that crossed DRAM in a cold call beside the model's, from the committed rows."""
    rows = [row for row in results.load(H200).values() if row["dram_bytes"] and row["bytes"]]
    if not rows:
        return "Not counted yet; `make gpu-bench` counts them where there is `ncu`."
    lines = []
    for row in rows:
        model, counted = row["bytes"], row["dram_bytes"]
        sizes = [f"{model / 1e6:,.2f}", f"{counted / 1e6:,.2f}", f"{counted / model:.2f}"]
        lines.append([f"`{row['case']}`", *sizes])
    return table(["case", "model, MB", "DRAM, MB", "DRAM / model"], lines)


def accuracy() -> str:
    """What each axis costs on the shipped capture, from the committed run."""
    run = json.loads(ACCURACY.read_text(encoding="utf-8"))
    found = {(r["experiment"], r["variant"], r["metric"]): r for r in run["results"]}
    lines = []
    for *key, name in ACCURACY_LINES:
        result = found[tuple(key)]
        low, high = (summary.number(100 * result[end]) for end in ("low", "high"))
        value = f"{summary.number(100 * result['value'])} %"
        lines.append([name, key[-1], value, f"{low} to {high}", str(result["n"])])
    return table(["what varies", "measure", "value", "95 % interval", "rows"], lines)


def take_accuracy(path: Path) -> None:
    """Keeps what the README and a comparison need of a run."""
    run = json.loads(path.read_text(encoding="utf-8"))
    run["results"] = [r for r in run["results"] if r["bucket"] == "all"]
    ACCURACY.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


BLOCKS = {
    README: {
        "results": bench_table,
        "records": records,
        "bytes": cache_bytes,
        "support": support,
        "accuracy": accuracy,
    },
    TRAFFIC: {"dram": dram_table},
}
for document in sorted((ROOT / "docs").glob("*.md")):
    BLOCKS.setdefault(document, {})
ROWS = re.compile("(<!-- rendered: rows (.*?) -->\n).*?(<!-- end -->)", re.S)


def render(path: Path) -> str:
    """The text of a document with every rendered block replaced."""
    text = path.read_text()
    for name, block in BLOCKS[path].items():
        pattern = re.compile(f"(<!-- rendered: {name} -->\n).*?(<!-- end -->)", re.S)
        text, found = pattern.subn(lambda m, b=block: f"{m[1]}{b()}\n{m[2]}", text)
        assert found == 1, f"{path.name} has {found} blocks named {name}"
    return ROWS.sub(lambda m: f"{m[1]}{rows_table(m[2].split())}\n{m[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes tables of documents from code and rows.")
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--accuracy", type=Path, metavar="results.json", help="take a run first")
    options = parser.parse_args()
    if options.accuracy:
        take_accuracy(options.accuracy)
    rendered = {path: render(path) for path in BLOCKS}
    stale = [path for path, text in rendered.items() if text != path.read_text()]
    if options.check:
        names = ", ".join(path.name for path in stale)
        sys.exit(f"stale: {names}; run python docs/render.py" if stale else 0)
    for path in stale:
        path.write_text(rendered[path])


if __name__ == "__main__":
    main()
