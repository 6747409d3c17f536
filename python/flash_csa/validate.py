"""FLASH_CSA_VALIDATE=1: checks of values, beside those of types and shapes that ops always make.

Eagerly a bad value raises one ValueError line with the first bad index; on a GPU that waits for the
device. While a stream captures, a bit of the device's error words is set instead, at every replay,
and `flash_csa.check()` reads and clears them. Traced code (torch.compile) is not checked. Off, the
wrappers call the ops as they are.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from . import _C
from ._fakes import by_name, check_tensors

ops = SimpleNamespace()  # what the wrappers call: the ops, as they are or behind the checks
_OP_NAMES = list(_C.SIGNATURES)
_LABELS = {op: [row[0] for row in rows] for op, rows in _C.SIGNATURES.items()}
_words: dict[torch.device, torch.Tensor] = {}  # i64 [ops]; bit i: argument i of the signature table
_deferred = False
_INT32_END = 1 << 31


@dataclass(frozen=True)
class Finding:
    """What one argument must satisfy: `bad` marks the offending ones of `values`, same shape."""

    label: str
    expected: str  # follows "must"
    values: torch.Tensor
    bad: torch.Tensor
    noun: str = ""  # what the values are, where they are not the argument's own


Findings = Iterator[Finding]


def _in(label: str, t: torch.Tensor | None, low: int, end: int, where=None) -> Findings:
    """t in [low, end), in the places of `where`."""
    if t is not None:
        bad = (t < low) | (t > end - 1)
        limits = f"at least {low}" if end == _INT32_END else f"in [{low}, {end})"
        yield Finding(label, f"be {limits}", t, bad if where is None else bad & where)


def _finite(label: str, t: torch.Tensor | None, rows: torch.Tensor | None = None) -> Findings:
    """t finite, in the rows of a mask."""
    if t is not None:
        bad = ~t.isfinite()
        if rows is not None:
            bad &= rows.view(-1, *[1] * (t.dim() - 1))
        yield Finding(label, "be finite", t, bad)


def _no_nan(label: str, t: torch.Tensor | None) -> Findings:
    if t is not None:
        yield Finding(label, "not be NaN", t, t.isnan())


def _capacity(a: dict, prefix: str) -> int:
    """Slots of a page buffer; without one, all that an int32 can name."""
    pages = a.get(f"{prefix}_pages" if prefix != "pages" else "pages")
    return _INT32_END if pages is None else pages.shape[0] * a[f"{prefix}_page_size"]


def _columns(t: torch.Tensor) -> torch.Tensor:
    return torch.arange(t.shape[1], device=t.device)


def _request(a: dict) -> torch.Tensor:
    """The request of each row, 0 for a padded one."""
    return a["batch_row_request"].clamp(0, max(0, len(a["batch_start"]) - 1)).long()


def _valid(a: dict) -> torch.Tensor:
    """Rows that are not padding."""
    request = a["batch_row_request"]
    return (a["batch_positions"] >= 0) & (request >= 0) & (request < len(a["batch_start"]))


def _batch(a: dict, positions_end: int = _INT32_END) -> Findings:
    positions, request = a["batch_positions"], a["batch_row_request"]
    cu, start, rows = a["batch_cu_tokens"], a["batch_start"], len(positions)
    yield from _in("batch.positions", positions, -1, positions_end)
    yield from _in("batch.row_request", request, -1, len(start))
    padded = "be -1 exactly where positions is"
    yield Finding("batch.row_request", padded, request, (request < 0) != (positions < 0))
    yield from _in("batch.start", start, 0, _INT32_END)
    bad = (cu < 0) | (cu > rows)
    bad[0] |= cu[0] != 0
    bad[1:] |= (cu.diff() < 0) | (cu.diff() > a["batch_max_rows"])
    steps = f"ascend from 0 to at most {rows} rows, by at most max_rows = {a['batch_max_rows']}"
    yield Finding("batch.cu_tokens", steps, cu, bad)
    if len(start) == 0 or rows == 0:
        return
    valid, first = _valid(a), cu[_request(a)]
    offset = torch.arange(rows, device=cu.device) - first
    gap = ~valid.roll(1) & (offset > 0)
    bad = valid & (gap | (offset < 0) | (positions != start[_request(a)] + offset))
    yield Finding("batch.positions", "be consecutive from each request's start", positions, bad)


def _pool(a: dict, positions_end: int) -> Findings:
    blocks, counts = a["pool_blocks"], a["pool_counts"]
    if blocks is None:
        return
    yield from _in("pool.counts", counts, 0, blocks.shape[1] + 1)
    end = -(-positions_end // _C.POOL_BLOCK)
    counted = _columns(blocks) < counts[:, None]
    yield from _in("pool.blocks", blocks, 0, end, counted)
    falls = torch.zeros_like(blocks, dtype=torch.bool)
    falls[:, 1:] = blocks.diff(dim=1) <= 0
    yield Finding("pool.blocks", "ascend without repetition", blocks, falls & counted)


def _section(a: dict, kinds: str, tile: int) -> Findings:
    """The schedule is a section for work of this kind: the others have rows cut at other places."""
    schedule = a["schedule"]
    word = _C.SCHEDULE_TILE_WORD
    header = slice(word, word + 1)
    bad = torch.zeros_like(schedule, dtype=torch.bool)
    bad[header] = schedule[header] != tile
    expected = f"be {kinds} section, whose word {word} is {tile}"
    yield Finding("schedule", expected, schedule, bad)


def _list(a: dict, name: str, capacity: int) -> Findings:
    """One of attend's lists: lengths, and the slots within them."""
    slots, lengths = a[f"{name}_slots"], a[f"{name}_lengths"]
    if slots is not None:
        yield from _in(f"{name}.lengths", lengths, 0, slots.shape[1] + 1)
        read = _columns(slots) < lengths[:, None]
        yield from _in(f"{name}.slots", slots, -1, capacity, read)


def _store(a: dict) -> Findings:
    yield from _in("slots", a["slots"], -1, _capacity(a, "pages"))
    yield from _finite("rows", a["rows"], a["slots"] >= 0)


def _load(a: dict) -> Findings:
    yield from _in("slots", a["slots"], -1, _capacity(a, "pages"))


def _rope_store(a: dict) -> Findings:
    rows = a["positions"] >= 0
    yield from _in("positions", a["positions"], -1, len(a["cos_sin"]))
    yield from _in("slots", a["slots"], -1, _capacity(a, "window"))
    yield from _finite("q", a["q"], rows)
    yield from _finite("kv", a["kv"], rows & (a["slots"] >= 0))


def _quantize_query(a: dict) -> Findings:
    yield from _in("positions", a["positions"], -1, len(a["cos_sin"]))
    yield from _finite("q", a["q"], a["positions"] >= 0)


def _compress(a: dict) -> Findings:
    yield from _batch(a, len(a["cos_sin"]))
    valid = _valid(a)
    for name in ("kv", "gate"):
        yield from _finite(name, a[name], valid)
    for name in ("norm_weight", "bias", "key_weight", "key_norm_weight"):
        yield from _finite(name, a[name])
    yield from _in("entry_first", a["entry_first"], 0, _INT32_END)
    slots = a["entry_slots"]
    yield from _in("entry_slots", slots, -1, min(_capacity(a, "main"), _capacity(a, "index")))
    closing = valid & ((a["batch_positions"] + 1) % a["ratio"] == 0)
    yield Finding(
        "entry_slots", "be -1 where the row closes no entry", slots, (slots >= 0) & ~closing
    )
    yield from _tail(a, closing)


def _tail(a: dict, closing: torch.Tensor) -> Findings:
    """Groups that began before the step need a tail."""
    tail, slots, ratio = a["tail_rows"], a["batch_tail_slot"], a["ratio"]
    if tail is not None:
        yield from _in("batch.tail_slot", slots, -1, len(tail))
    if len(slots) == 0:
        return
    request = _request(a)
    entry = (a["batch_positions"] + 1) // ratio - 1
    wanted = closing
    if a["entry_first"] is not None:
        wanted = wanted & (entry >= a["entry_first"][request])
    overlap = 1 if ratio == 4 else 0
    first = ((entry - overlap) * ratio).clamp(min=0)
    absent = torch.ones_like(wanted) if tail is None else slots[request] < 0
    bad = wanted & (first < a["batch_start"][request]) & absent
    expected = "be given where a closing group began before the step"
    if tail is None:
        yield Finding("tail.rows", expected, request, bad, "None for request ")
    else:
        yield Finding("batch.tail_slot", expected, request, bad, "-1 for request ")


def _index(a: dict) -> Findings:
    yield from _batch(a)
    table, valid = a["block_table"], _valid(a)
    yield from _in("block_table", table, -1, len(a["index_pages"]))
    yield from _finite("weights", a["weights"], valid)
    if a["query_scales"].is_floating_point():
        yield from _finite("query.scales", a["query_scales"], valid)
    yield from _pool(a, table.shape[1] * a["index_page_size"])
    yield from _section(a, "an index or reindex", _C.INDEX_TILE)


def _select(a: dict) -> Findings:
    yield from _batch(a)
    table, page_size = a["block_table"], a["page_size"]
    yield from _in("block_table", table, -1, _INT32_END // page_size)
    yield from _pool(a, table.shape[1] * page_size)
    yield from _section(a, "an index or reindex", _C.INDEX_TILE)


def _normalize_pool(a: dict) -> Findings:
    yield from _in("positions", a["positions"], -1, _INT32_END)


def _attend(a: dict) -> Findings:
    yield from _list(a, "selection", _capacity(a, "main"))
    yield from _list(a, "window", _capacity(a, "window"))
    table, n_vis = a["contiguous_block_table"], a["contiguous_n_vis"]
    if table is not None:
        entries = table.shape[1] * a["main_page_size"]
        yield from _in("contiguous.block_table", table, -1, len(a["main_pages"]))
        yield from _in("contiguous.row_request", a["contiguous_row_request"], -1, len(table))
        yield from _in("contiguous.n_vis", n_vis, 0, entries + 1)
    lengths = (a["selection_lengths"], a["window_lengths"], n_vis)
    reads = torch.stack([n > 0 for n in lengths if n is not None]).any(0)
    yield from _finite("q", a["q"], reads)
    yield from _no_nan("sink", a["sink"])
    yield from _derotate(a)
    yield from _section(a, "a window, attend or contiguous", _C.ATTEND_TILE)


def _derotate(a: dict) -> Findings:
    if a["derotate_cos_sin"] is not None:
        positions_end = len(a["derotate_cos_sin"])
        yield from _in("derotate.positions", a["derotate_positions"], -1, positions_end)


def _merge(a: dict) -> Findings:
    lses = a["lses"]
    yield from _no_nan("lses", lses)
    bad = ~a["outs"].isfinite() & lses.isfinite()[..., None]
    yield Finding("outs", "be finite where its lse is", a["outs"], bad)
    yield from _no_nan("sink", a["sink"])
    yield from _derotate(a)


def _merge_selections(a: dict) -> Findings:
    table, page_size = a["block_table"], a["page_size"]
    yield from _in("positions", a["positions"], -1, table.shape[1] * page_size)
    yield from _in("row_request", a["row_request"], -1, len(table))
    yield from _in("block_table", table, -1, _INT32_END // page_size)


def _merge_pools(a: dict) -> Findings:
    yield from _in("blocks", a["blocks"], -1, _INT32_END)
    yield from _in("positions", a["positions"], -1, _INT32_END)


def _step_slots(a: dict) -> Findings:
    yield from _batch(a)
    for table, page_size in zip(a["block_tables"], a["page_sizes"], strict=True):
        yield from _in("block_tables", table, -1, _INT32_END // page_size)
    window = a["window_table"]
    yield from _in("window_table", window, -1, _INT32_END // a["window_page_size"])
    yield from _in("window_first", a["window_first"], 0, _INT32_END)
    yield from _in("entry_first", a["entry_first"], 0, _INT32_END)
    if len(a["batch_start"]) == 0:
        return
    valid, request, positions = _valid(a), _request(a), a["batch_positions"]
    column = (positions // a["window_page_size"]).clamp(min=0) % window.shape[1]
    yield Finding(
        "window_table",
        "have a page for every position of the step",
        positions,
        valid & (window[request, column] < 0),
        "position ",
    )
    for i, ratio in enumerate(a["ratios"]):
        yield _skipped(a, i, ratio, valid & ((positions + 1) % ratio == 0), request)


def _skipped(a: dict, i: int, ratio: int, closing: torch.Tensor, request) -> Finding:
    """Entries that close without a page: they would never be computed again."""
    table = a["block_tables"][i]
    entry = (a["batch_positions"] + 1) // ratio - 1
    if a["entry_first"] is not None:
        closing = closing & (entry >= a["entry_first"][i][request])
    column = (entry // a["page_sizes"][i]).clamp(min=0)
    absent = column >= table.shape[1]
    if table.shape[1] > 0:
        absent |= table[request, column.clamp(max=table.shape[1] - 1)] < 0
    expected = f"have a page for every entry that a row closes at ratio {ratio}"
    return Finding("block_tables", expected, entry, closing & absent, "entry ")


def _schedule(a: dict) -> Findings:
    yield from _batch(a)
    yield from _in("window_first", a["window_first"], 0, _INT32_END)


_RULES: dict[str, Callable[[dict], Findings]] = {
    "store": _store,
    "load": _load,
    "rope_store": _rope_store,
    "quantize_query": _quantize_query,
    "compress": _compress,
    "index_scores": _index,
    "select": _select,
    "index_select": _index,
    "normalize_pool": _normalize_pool,
    "attend": _attend,
    "merge": _merge,
    "merge_selections": _merge_selections,
    "merge_pools": _merge_pools,
    "step_slots": _step_slots,
    "schedule": _schedule,
}


def findings(op: str, a: dict) -> list[Finding]:
    """What is checked in a call; [] where the op itself refuses its types, shapes or numbers."""
    return list(_RULES[op](a)) if op in _RULES and _well_formed(op, a) else []


def _well_formed(op: str, a: dict) -> bool:
    try:
        check_tensors(op, a)
    except ValueError:
        return False
    sizes = [
        size
        for name, size in a.items()
        if name.endswith("page_size")
        and a.get(name.removesuffix("_page_size") + "_pages", size) is not None
    ]
    sizes += [*a.get("page_sizes", []), *a.get("ratios", []), a.get("ratio", 1)]
    lists = {len(a[name]) for name in ("ratios", "page_sizes", "block_tables") if name in a}
    return min(sizes) > 0 and len(lists) < 2


def _raise(op: str, found: Finding) -> None:
    if not found.bad.any():
        return
    index = found.bad.nonzero()[0].tolist()
    value = found.values[tuple(index)].item()
    raise ValueError(
        f"flash_csa.{op}: {found.label} must {found.expected}, got {found.noun}{value} at {index}"
    )


def _device_words(device: torch.device) -> torch.Tensor:
    if device not in _words:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "flash_csa.check: with FLASH_CSA_VALIDATE=1 a step must have run once before it is "
                "captured, got its first run"
            )
        _words[device] = torch.zeros(len(_OP_NAMES), dtype=torch.int64, device=device)
    return _words[device]


def _record(op: str, found: Finding) -> None:
    """Sets the argument's bit, without a look at the device."""
    word = _device_words(found.bad.device)[_OP_NAMES.index(op)]
    word |= found.bad.any().to(torch.int64) << _LABELS[op].index(found.label)


def _checked(op: str) -> Callable:
    """The op behind its checks of values."""
    packet = getattr(torch.ops.flash_csa, op)

    def call(*args, **kwargs) -> None:
        if not torch.compiler.is_compiling():
            for found in findings(op, by_name(op, args, kwargs)):
                _device_words(found.bad.device)
                later = _deferred or (
                    found.bad.is_cuda and torch.cuda.is_current_stream_capturing()
                )
                (_record if later else _raise)(op, found)
        packet(*args, **kwargs)

    return call


def _install(enabled: bool) -> None:
    for op in _OP_NAMES:
        setattr(ops, op, _checked(op) if enabled else getattr(torch.ops.flash_csa, op))


@contextlib.contextmanager
def validation(enabled: bool = True, *, deferred: bool = False) -> Iterator[None]:
    """Turns value checks on or off for a block of code; `deferred` as under stream capture."""
    global _deferred
    before = ops.store is not torch.ops.flash_csa.store, _deferred
    _install(enabled)
    _deferred = deferred
    try:
        yield
    finally:
        _install(before[0])
        _deferred = before[1]


def check() -> None:
    """Raises ValueError if a captured step met a bad value since the last call; clears the record.

    Has something to say under FLASH_CSA_VALIDATE=1 alone. Waits for the devices concerned.
    """
    lines = []
    for device, words in _words.items():
        for op, word in zip(_OP_NAMES, words.tolist(), strict=True):
            bad = [label for i, label in enumerate(_LABELS[op]) if word >> i & 1]
            lines += [f"{op}: {label} on {device}" for label in bad]
        words.zero_()
    if lines:
        raise ValueError(
            f"flash_csa.check: captured steps must meet valid values, got bad ones in "
            f"{'; '.join(lines)}"
        )


def _wanted() -> bool:
    value = os.environ.get("FLASH_CSA_VALIDATE") or "0"
    if value not in ("0", "1"):  # "true" would leave the checks off, and nobody would know
        raise ValueError(f"flash_csa: FLASH_CSA_VALIDATE must be 0 or 1, got {value}")
    return value == "1"


_install(_wanted())
