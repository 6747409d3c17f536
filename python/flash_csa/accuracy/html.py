"""The report as one HTML file: no script, no font, no picture from elsewhere."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import count
from typing import Any

from . import plots, summary
from .baseline import Regression

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #111827; background: #fff;
       max-width: 1280px; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin-bottom: .25rem; }
h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid #e5e7eb; }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
p.held, figcaption, .quiet { color: #4b5563; font-size: .87rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; white-space: nowrap;
         border-bottom: 1px solid #f3f4f6; }
th { border-bottom: 1px solid #9ca3af; font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child, .text { text-align: left; }
td small { color: #6b7280; }
td.text { white-space: normal; }
tr.bad td { background: #fee2e2; }
.ok { color: #047857; } .bad { color: #b91c1c; font-weight: 600; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; }
details { margin: .5rem 0; } summary { cursor: pointer; color: #1d4ed8; }
nav a { margin-right: 1rem; color: #1d4ed8; text-decoration: none; }
"""


def page(
    run: Mapping[str, Any],
    regressions: Sequence[Regression] | None = None,
) -> str:
    """The whole document; regressions None: there was no baseline."""
    drawn = plots.figures(run)
    sections = [
        ("verdict", "Verdict", _verdict(run, regressions)),
        ("figures", "Figures", _figures(drawn)),
        ("lengths", "Context lengths", _lengths(run)),
        ("tables", "Tables", _tables(run)),
        ("kernels", "Kernel error beside format error", _kernels(run)),
        ("inputs", "Inputs and settings", _inputs(run)),
    ]
    kept = [section for section in sections if section[2]]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in kept)
    body = "".join(f'<h2 id="{name}">{title}</h2>{content}' for name, title, content in kept)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>flash_csa accuracy</title><style>{STYLE}</style></head><body>"
        "<h1>What quantisation and selection cost</h1>"
        f'<p class="quiet">flash_csa {escape(run["version"])}. One axis varies at a time; every '
        "figure is a mean over query rows with its 95 % interval.</p>"
        f"<nav>{links}</nav>{body}</body></html>\n"
    )


def _verdict(run: Mapping[str, Any], regressions: Sequence[Regression] | None) -> str:
    failed = summary.failures(run)
    text = f'<p class="{"bad" if failed else "ok"}">{escape(summary.headline(run))}</p>'
    stages = [
        ("" if held == total else "bad", [escape(axis), str(held), str(total)])
        for axis, held, total in summary.stages(run)
    ]
    text += _table(["axis, in the order of the data flow", "checks that hold", "of"], stages)
    if regressions is not None:
        text += _regressions(regressions)
    rows = [
        (
            "bad" if not c["holds"] else "",
            [
                escape(c["axis"]),
                escape(c["name"]),
                c["backend"],
                summary.number(c["value"]),
                f"{summary.number(c['low'])} to {summary.number(c['high'])}",
                f"{c['n']:,}",
                escape(c["held"]),
            ],
        )
        for c in summary.ordered(run)
    ]
    header = ["axis", "check", "back end", "found", "allowed", "samples", "held fixed"]
    table = _table(header, rows, text={1, 6})
    return text + f"<details{' open' if failed else ''}><summary>Checks</summary>{table}</details>"


def _regressions(regressions: Sequence[Regression]) -> str:
    if not regressions:
        return '<p class="ok">Nothing regressed against the baseline.</p>'
    axes = list(dict.fromkeys(r.axis for r in regressions))
    rows = [
        ("bad", [escape(r.axis), escape(r.what), *map(summary.number, (r.baseline, r.value))])
        for r in regressions[:40]
    ]
    return (
        f'<p class="bad">{len(regressions)} results regressed; axes: {escape(", ".join(axes))}.</p>'
        + _table(["axis", "result", "baseline", "now"], rows, text={1})
    )


def _figures(drawn: Mapping[str, tuple[str, str]]) -> str:
    if not drawn:
        return '<p class="quiet">Figures need matplotlib (extra <code>plots</code>).</p>'
    return "".join(
        f"<h3>{escape(title)}</h3><figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"
        for title, (caption, image) in drawn.items()
    )


def _lengths(run: Mapping[str, Any]) -> str:
    found = summary.lengths(run)
    if not found:
        return ""
    rows = [
        (
            "",
            [
                escape(f"{each['variant']} ({each['backend']})"),
                *(
                    f"{each[k]:,}"
                    for k in ("declared", "longest_measured", "failure_free", "effective")
                ),
            ],
        )
        for each in found
    ]
    note = (
        "Failure-free: longest context measured up to which every planted row is answered; "
        f"effective: up to which at least {summary.EFFECTIVE:.0%} are."
    )
    header = ["", "declared", "longest measured", "failure-free", "effective"]
    return f'<p class="held">{note}</p>{_table(header, rows)}'


def _tables(run: Mapping[str, Any]) -> str:
    parts = []
    for view in summary.views(run):
        experiment, name, context, backend = view
        facts = run["experiments"][experiment]
        parts.append(
            f"<h3>{escape(facts['title'])}: {escape(name)}, {context:,} tokens, {backend}</h3>"
            f'<p class="held">Held fixed: {escape(facts["held"])}.</p>'
            + _variants(run, view, "all")
            + _buckets(run, view)
        )
    return "".join(parts)


def _variants(run: Mapping[str, Any], view: tuple, bucket: str) -> str:
    found = summary.rows(run, view, bucket)
    facts = [f for f in summary.FACTS if any(f in row["facts"] for row in found)]
    metrics = [m for m in summary.SHOWN[view[0]] if any(m in row for row in found)]
    rows = []
    for row in found:
        cells = [escape(row["variant"])]
        cells += [summary.number(row["facts"].get(fact)) for fact in facts]
        cells += [_cell(row.get(metric)) for metric in metrics]
        cells.append(str(next(row[m]["n"] for m in metrics if m in row)))
        rows.append(("", cells))
    return _table(["", *(summary.FACTS[f] for f in facts), *metrics, "rows"], rows)


def _buckets(run: Mapping[str, Any], view: tuple) -> str:
    """The first metric of every variant by mode, layer, position, or kind and place."""
    metric = summary.SHOWN[view[0]][0]
    keys = dict(zip(("experiment", "input", "context", "backend"), view, strict=True))
    found = summary.pick(run, **keys, metric=metric)
    buckets = [b for b in dict.fromkeys(r["bucket"] for r in found) if b != "all"]
    variants = list(dict.fromkeys(r["variant"] for r in found))
    by = {(r["variant"], r["bucket"]): r for r in found}
    rows = [
        ("", [escape(v), *(_cell(by.get((v, bucket))) for bucket in buckets)]) for v in variants
    ]
    table = _table(["", *buckets], rows)
    return f"<details><summary>{metric} by bucket</summary>{table}</details>" if buckets else ""


def _kernels(run: Mapping[str, Any]) -> str:
    found = [r for r in summary.kernel_errors(run) if r["bucket"] == "all"]
    rows = [
        (
            "",
            [
                escape(f"{r['experiment']}: {r['variant']}"),
                escape(r["metric"]),
                f"{r['context']:,}",
                *(summary.number(r[k]) for k in ("formula", "value")),
                f"{r['difference']:.2g}",
            ],
        )
        for r in found
    ]
    header = ["result", "metric", "context", "by formula", "by kernels", "kernel error"]
    return _table(header, rows) if rows else ""


def _inputs(run: Mapping[str, Any]) -> str:
    rows = [("", [escape(name), escape(origin)]) for name, origin in run["origins"].items()]
    settings = [("", [escape(key), escape(str(value))]) for key, value in run["settings"].items()]
    return _table(["input", "origin"], rows, text={1}) + _table(
        ["setting", "value"], settings, text={1}
    )


def _cell(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return ""
    value = summary.number(result["value"])
    if result["low"] is None or result["high"] is None or result["low"] == result["high"]:
        return value
    low, high = summary.number(result["low"]), summary.number(result["high"])
    return f"{value} <small>{low} to {high}</small>"


def _table(
    header: Iterable[str], rows: Iterable[tuple[str, Sequence[str]]], text: Iterable[int] = ()
) -> str:
    """rows: class and cells of each; cells are HTML. text: columns of prose."""
    prose = set(text)

    def line(tag: str, cells: Iterable[str]) -> str:
        marks = (' class="text"' if number in prose else "" for number in count())
        return "".join(
            f"<{tag}{mark}>{cell}</{tag}>" for mark, cell in zip(marks, cells, strict=False)
        )

    head, body = line("th", header), ""
    for mark, cells in rows:
        name = f' class="{mark}"' if mark else ""
        body += f"<tr{name}>{line('td', cells)}</tr>"
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
