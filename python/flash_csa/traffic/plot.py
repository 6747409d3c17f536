"""A figure of a cache's bytes over context length, and a roofline of measured kernels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..accounting import BF16, bytes_per_token
from ..plan import HEAD_DIM, INDEX_DIM, LayerPlan
from ..records import RECORDS

CONTEXTS = (16_384, 65_536, 131_072, 262_144, 524_288, 1_048_576)
# Roofs of an H200 as measured there: bytes/s of a streaming read, FLOP/s of library GEMMs.
READ, BF16_RATE, FP8_RATE = 4.6e12, 797e12, 1362e12
ROW_KEYS = ("stage", "device", "flops", "bytes", "tflops")  # what the roofline needs of a row


def formats() -> dict[str, tuple[int, int]]:
    """Bytes of a main and of an index record, by the name of the cache."""
    size = {name: record.bytes for name, record in RECORDS.items()}
    return {
        "FP4": (size["MainFp4"], size["IndexFp4"]),
        "FP8": (size["WindowFp8"], size["IndexFp8"]),
        "Hopper today": (size["MixedFp8"], size["IndexFp8"]),
        "BF16": (HEAD_DIM * BF16, INDEX_DIM * BF16),
    }


def check(path: Path) -> None:
    """Raises ValueError where matplotlib is missing or writes no such format."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError as error:
        raise ValueError("flash_csa.traffic: --plot needs matplotlib (extra `plots`)") from error
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix and path.suffix[1:].lower() not in formats:
        expected = f"a file of one of the formats {', '.join(formats)}"
        raise ValueError(f"flash_csa.traffic: --plot must be {expected}, got {path}")


def save(plan: LayerPlan, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the figure. rows: of the benchmark; without any there is no roofline.

    Raises:
        ValueError: see `check`, or the file cannot be written.
    """
    check(path)
    from matplotlib.figure import Figure

    kernels = [row for row in rows if row["flops"] and row["bytes"] and row["stage"]]
    panels = 2 if kernels else 1
    figure = Figure(figsize=(7 * panels, 5), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _stack(axes[0], plan)
    if kernels:
        _roofline(axes[1], kernels)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ValueError(f"flash_csa.traffic: --plot: {error}") from error


def _stack(axes: Any, plan: LayerPlan) -> None:
    """Grouped bars: one per format, main KV below, index keys on top."""
    width = 0.8 / len(formats())
    for number, (name, (main, index)) in enumerate(formats().items()):
        places = [i + (number - 1.5) * width for i in range(len(CONTEXTS))]
        parts = (float(bytes_per_token(plan, main, 0)), float(bytes_per_token(plan, 0, index)))
        color = f"C{number}"
        below = [parts[0] * context / 2**20 for context in CONTEXTS]
        above = [parts[1] * context / 2**20 for context in CONTEXTS]
        label = f"{name}: {sum(parts):,.0f} B/token"
        axes.bar(places, below, width, color=color, label=label)
        axes.bar(places, above, width, bottom=below, color=color, alpha=0.45)
    axes.set_xticks(range(len(CONTEXTS)), [f"{context >> 10}K" for context in CONTEXTS])
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("MiB per request: main KV, index keys (light)")
    axes.set_title("Global cache")
    axes.legend()


def _roofline(axes: Any, rows: list[dict[str, Any]]) -> None:
    intensity = [row["flops"] / row["bytes"] for row in rows]
    span = [min(0.05, *intensity), max(2000.0, *intensity)]
    for name, rate, style in (("BF16", BF16_RATE, "-"), ("FP8", FP8_RATE, "--")):
        ridge = rate / READ
        xs = [span[0], ridge, max(span[1], ridge)]
        roof = [min(rate, READ * x) / 1e12 for x in xs]
        label = f"{READ / 1e12:g} TB/s, {name} {rate / 1e12:g} TFLOP/s"
        axes.plot(xs, roof, style, color="black", label=label)
    for number, stage in enumerate(dict.fromkeys(row["stage"] for row in rows)):
        points = [
            (x, row["tflops"])
            for x, row in zip(intensity, rows, strict=True)
            if row["stage"] == stage
        ]
        axes.scatter(*zip(*points, strict=True), s=18, color=f"C{number}", label=stage)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte of HBM (model)")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"Kernels on {rows[0]['device']}")
    axes.legend(fontsize="small")
