"""The report's figures, as SVG texts."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .summary import pick

COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
PANEL, WIDE = 5.6, 8.4  # inches
ERROR_BAR = {"linewidth": 0.8}
# Experiment, metric and variants of the panels over context.
OVER_CONTEXT = (
    ("kv", "output error", ("E2M1 / E4M3 per 16", "E4M3 / UE8M0 per 32")),
    ("index", "recall", ("FP8", "FP4")),
    ("reuse", "recall", ("as planned", "Reuse only")),
    ("retrieval", "answered", ("FP32 index, BF16 KV", "FP4 index, FP4 KV", "as planned, FP4 KV")),
)
Figure = tuple[str, str]  # caption and SVG


def figures(run: Mapping[str, Any]) -> dict[str, Figure]:
    """By title. Empty without matplotlib; a figure without results is left out."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        return {}
    drawn = {
        "Bytes of an entry against error": _bytes_and_error(run),
        "Layer by layer": _layers(run),
        "Score gaps at the border of the selection": _gaps(run),
        "Over context": _contexts(run),
        "Designs: bytes, work and quality": _designs(run),
        "Planted evidence by kind and place": _evidence(run),
        "After long decode": _decode(run),
    }
    return {title: made for title, made in drawn.items() if made is not None}


def _figure(columns: int = 1, height: float = 3.6, rows: int = 1):
    """A figure and its panels, row by row; height: of a row."""
    from matplotlib.figure import Figure as Drawing

    width = PANEL * columns if columns > 1 else WIDE
    figure = Drawing(figsize=(width, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, color="#e5e7eb", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def svg(figure: Any, name: str) -> str:
    """The figure's <svg> element, without what a file of its own has in its head. Several share a
    page, so identifiers begin with `name`."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    body = text.getvalue()
    body = body[body.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(href="|url\()#', rf"\1#{name}-", body)
    body = re.sub(r' (?:xmlns(?::\w+)?|version)="[^"]*"', "", body)
    return body.replace("xlink:href", "href")


def _of(run: Mapping[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """Results by formula of the first input, a capture if there is one, at its longest context."""
    found = pick(run, backend="formula", **wanted)
    found = [r for r in found if r["input"] == found[0]["input"]]
    longest = max((r["context"] for r in found), default=0)
    return [r for r in found if r["context"] == longest]


def _told(result: Mapping[str, Any]) -> str:
    return f"{result['input']}, {result['context']:,} tokens, {result['n']} query rows"


def _interval(*results: Mapping[str, Any]) -> list[list[float]]:
    """Lengths of the error bars, below and above."""
    ends = [
        (
            r["value"] if r["low"] is None else r["low"],
            r["value"] if r["high"] is None else r["high"],
        )
        for r in results
    ]
    pairs = list(zip(results, ends, strict=True))
    return [
        [max(0.0, r["value"] - low) for r, (low, _) in pairs],
        [max(0.0, high - r["value"]) for r, (_, high) in pairs],
    ]


def _names(found: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(r["variant"] for r in found))


def _bytes_and_error(run: Mapping[str, Any]) -> Figure | None:
    found = [
        r for r in _of(run, experiment="kv", metric="output error", bucket="all") if r["value"]
    ]
    if not found:
        return None
    figure, (axis,) = _figure(height=4.2)
    families = list(dict.fromkeys(" ".join(r["variant"].split()[:3]) for r in found))
    for number, family in enumerate(families):
        for kept in (False, True):
            members = [
                r
                for r in found
                if " ".join(r["variant"].split()[:3]) == family and ("+" in r["variant"]) == kept
            ]
            axis.errorbar(
                [r["facts"]["bytes"] for r in members],
                [r["value"] for r in members],
                _interval(*members),
                fmt="s" if kept else "o",
                markersize=6,
                markerfacecolor="white" if kept else COLOURS[number],
                color=COLOURS[number],
                label=f"{family} scales, RoPE dims BF16" if kept else f"{family} scales",
            )
    for r in found:
        if r["facts"]["record"] or "FP32" in r["variant"]:
            place = (r["facts"]["bytes"], r["value"])
            name = f"{r['facts']['record'] or 'DSA'}, {place[0]} B"
            style = {"xytext": (-6, -16), "textcoords": "offset points", "fontsize": 9}
            axis.annotate(name, place, ha="right", **style)
    axis.set_yscale("log")
    axis.set_xlabel("bytes of an entry's main record")
    axis.set_ylabel("relative output error")
    axis.set_xlim(left=200)
    axis.set_ylim(bottom=0.6 * min(r["value"] for r in found))
    axis.legend(fontsize=7, frameon=False, loc="lower left")
    return f"Main KV alone varies; {_told(found[0])}; bars: 95 % intervals.", svg(figure, "bytes")


def _layers(run: Mapping[str, Any]) -> Figure | None:
    found = [r for r in _of(run, experiment="reuse") if r["bucket"].startswith("layer ")]
    if not found:
        return None
    figure, axes = _figure(2)
    names = [name for name in _names(found) if name != "oracle"]
    for axis, metric in zip(axes, ("recall", "output error"), strict=True):
        for number, name in enumerate(names):
            bars = [r for r in found if (r["variant"], r["metric"]) == (name, metric)]
            width = 0.8 / len(names)
            shift = (number - (len(names) - 1) / 2) * width
            places = [int(r["bucket"].split()[1]) + shift for r in bars]
            axis.bar(
                places,
                [r["value"] for r in bars],
                width,
                color=COLOURS[number],
                yerr=_interval(*bars),
                error_kw=ERROR_BAR,
                label=name,
            )
        axis.set_xlabel("layer of the group")
        axis.set_ylabel(metric)
    axes[1].legend(fontsize=8, frameon=False, loc="upper left")
    least = min(r["low"] for r in found if r["metric"] == "recall")
    axes[0].set_ylim(max(0.0, least - 0.1), 1.0)
    caption = f"Selections alone vary; {_told(found[0])}; recall of the layer's own full selection."
    return caption, svg(figure, "layers")


def _gaps(run: Mapping[str, Any]) -> Figure | None:
    found = [h for h in run["histograms"] if h["backend"] == "formula"]
    if not found:
        return None
    first = found[0]
    found = [h for h in found if (h["input"], h["context"]) == (first["input"], first["context"])]
    figure, (axis,) = _figure(height=3.2)
    for number, histogram in enumerate(found):
        step, counts = 1 / histogram["bins_per_decade"], histogram["counts"]
        edges = [10 ** (histogram["first_decade"] + i * step) for i in range(len(counts) + 1)]
        label = f"{histogram['variant']} ({sum(counts)} rows and layers)"
        shares = [n / max(1, sum(counts)) for n in counts]
        axis.stairs(shares, edges, color=COLOURS[number], linewidth=1.8, label=label)
    axis.set_xscale("log")
    axis.set_xlabel("score of the last entry selected less the first left out, standard deviations")
    axis.set_ylabel("share of rows")
    axis.legend(fontsize=8, frameon=False, loc="upper left")
    caption = (
        "The smaller the gap, the smaller the error that swaps entries; "
        f"{first['input']}, {first['context']:,} tokens."
    )
    return caption, svg(figure, "gaps")


def _contexts(run: Mapping[str, Any]) -> Figure | None:
    panels = []
    for experiment, metric, variants in OVER_CONTEXT:
        found = pick(run, experiment=experiment, metric=metric, bucket="all")
        found = [r for r in found if r["variant"] in variants]
        if len({r["context"] for r in found}) > 1:
            panels.append((f"{experiment}: {metric}", found))
    if not panels:
        return None
    figure, axes = _figure(2, 3.4, rows=-(-len(panels) // 2))
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, found) in zip(axes, panels, strict=False):
        keys = ("variant", "input", "backend")
        lines = list(dict.fromkeys(tuple(r[k] for k in keys) for r in found))
        for number, line in enumerate(lines):
            points = [r for r in found if tuple(r[k] for k in keys) == line]
            points.sort(key=lambda r: r["context"])
            axis.errorbar(
                [r["context"] for r in points],
                [r["value"] for r in points],
                _interval(*points),
                fmt="o-" if line[2] == "formula" else "s--",
                markersize=4,
                color=COLOURS[number % len(COLOURS)],
                label=", ".join(line),
            )
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}K")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("context, tokens")
        axis.legend(fontsize=7, frameon=False)
    return "Means over query rows with 95 % intervals.", svg(figure, "contexts")


def _readable_log(axis: Any) -> None:
    """Ticks at 1, 2 and 5 of each decade, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.xaxis.set_minor_formatter(NullFormatter())


def _designs(run: Mapping[str, Any]) -> Figure | None:
    found = _of(run, experiment="designs", metric="output error", bucket="all")
    if not found:
        return None
    figure, axes = _figure(2)
    panels = {
        "bytes_per_token_and_layer": "cache bytes per token and layer",
        "comparisons_per_query_and_layer": "index comparisons per query and layer",
    }
    for axis, (fact, label) in zip(axes, panels.items(), strict=True):
        for number, r in enumerate(found):
            axis.errorbar(
                r["facts"][fact],
                r["value"],
                _interval(r),
                fmt="o",
                markersize=7,
                color=COLOURS[number],
                label=r["variant"],
            )
        _readable_log(axis)
        axis.set_xlabel(label)
        axis.set_ylabel("output error against dense BF16")
    axes[0].legend(fontsize=8, frameon=False)
    caption = (
        f"{_told(found[0])}. The compressors of ratios above 1 are drawn, not trained, which "
        "exaggerates their error."
    )
    return caption, svg(figure, "designs")


def _evidence(run: Mapping[str, Any]) -> Figure | None:
    variant = "as planned, FP4 KV"
    found = _of(run, experiment="retrieval", metric="answered", variant=variant)
    if not found:
        return None
    figure, axes = _figure(2, 3.2)
    for axis, kind in zip(axes, ("kind", "place"), strict=True):
        bars = [r for r in found if r["bucket"].startswith(f"{kind} ")]
        names = [r["bucket"].removeprefix(f"{kind} ") for r in bars]
        values = [r["value"] for r in bars]
        axis.barh(
            names, values, xerr=_interval(*bars), color=COLOURS[0], height=0.6, error_kw=ERROR_BAR
        )
        axis.set_xlim(0, 1.02)
        axis.set_xlabel("share of rows answered")
        axis.set_title(f"by {kind}", fontsize=10)
    every = next(r for r in found if r["bucket"] == "all")
    return f"{variant}; {_told(every)}.", svg(figure, "evidence")


def _decode(run: Mapping[str, Any]) -> Figure | None:
    found = _of(run, experiment="decode", metric="output error", bucket="all")
    if not found:
        return None
    figure, (axis,) = _figure(height=3.4)
    chains = [r["variant"].rsplit(", step", 1)[0] for r in found]
    for number, name in enumerate(dict.fromkeys(chains)):
        line = [r for r, chain in zip(found, chains, strict=True) if chain == name]
        axis.errorbar(
            [r["facts"]["step"] for r in line],
            [r["value"] for r in line],
            _interval(*line),
            fmt="o-",
            markersize=4,
            color=COLOURS[number],
            label=name,
        )
    axis.set_xscale("log", base=2)
    axis.set_xlabel("decode step")
    axis.set_ylabel("output error against the exact chain")
    axis.legend(fontsize=8, frameon=False)
    return f"{_told(found[0])}, each the start of a chain.", svg(figure, "decode")
