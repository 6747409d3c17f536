"""Stage by stage: the back end under test against the formulas, on equal inputs.

What is left here is kernel error alone; a fault shows at its own stage, since every stage is fed
with what the formulas made of the ones before, or compared with what the back end itself makes of
the same by a plainer way. What a back end has beyond `Formula` is compared where it is there:
`Compiled` names it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..reference import index
from ..reference.quant import quantize
from ..reference.rope import derotate
from .activations import Shape
from .backends import Stored, Where
from .case import FORMULA, Case
from .checks import Check
from .experiments.reuse import selections
from .formats import (
    BF16_MAIN,
    INDEX_BF16,
    INDEX_FP4,
    INDEX_FP8,
    MAIN_FP4,
    MAIN_FP8,
    MIXED_FP8,
    Variant,
)
from .metrics import relative_error
from .planted import POOL_BLOCK, WINDOW
from .synthetic import gaussian

HELD = "inputs of the stage, as the formulas made them"
# Of attention, by what it writes: BF16 probabilities and output; sums of another order.
ROUNDING = {"BF16": 6e-3, "FP32": 1e-4}
LSE = 1e-4  # FP32 logits, relative to the larger of 1 and the value
BIAS = {"BF16": 5e-4, "FP32": 1e-5}  # how far rounding may shrink or stretch an output on average
TIED = 4  # values of a score for each standard deviation, where ties are made
SCORES = 1e-5  # FP32 sums of another order, relative to the row's largest
GROUP = 2e-2  # BF16 output, and entries whose scores differ in the last bit
GROUP_TOKENS, GROUP_K, GROUP_SHAPE = 2048, 256, Shape(layers=6, heads=8, rows=16)
EXACT_ROWS, EXACT_ENTRIES = 4, 2048
CODES, FEW = 0.05, 2  # share, or number, of entries whose pooled value lies on a rounding border


def compare(case: Case) -> list[Check]:
    """All stages of `case.backend`."""
    stages = (
        _step,
        _compress,
        _records,
        _rotated,
        _index,
        _choices,
        _fused,
        _attention,
        _beside,
        _layers,
    )
    return [check for stage in stages for check in stage(case)]


def _step(case: Case) -> Iterator[Check]:
    """Which records a row may read and which entry it closes."""
    step = getattr(case.backend, "step", None)
    if step is None:
        return
    early = torch.arange(2 * WINDOW + 1, device=case.inputs.device)
    positions = torch.cat([early, case.positions])
    offsets = torch.arange(WINDOW, device=positions.device)
    lists = (positions[:, None] - (WINDOW - 1)).clamp(min=0) + offsets
    lists = torch.where(lists <= positions[:, None], lists, -1)
    for ratio in (1, 2, 4, 128):
        recent, closed, seen = step(positions, ratio)
        if ratio == 1:
            yield _equal("visibility", "positions of the window", recent, lists)
        ends = (positions + 1) % ratio == 0
        entries = torch.where(ends, positions // ratio, -1)
        yield _equal("visibility", f"ratio {ratio}, entries that rows close,", closed, entries)
        name = f"ratio {ratio}, numbers of visible entries"
        yield _equal("visibility", name, seen, Where(positions, ratio).n_vis)


def _records(case: Case) -> Iterator[Check]:
    for variant in (BF16_MAIN, MAIN_FP4, MAIN_FP8, MIXED_FP8):
        if case.backend.supports(variant):
            # The window's format shows the window's codec, as main KV too.
            axis = "window KV" if variant == MAIN_FP8 else "main KV"
            made, expected = case.main(variant), case.main(variant, backend=FORMULA)
            yield _equal(axis, f"{variant.name}, values", made.values, expected.values)
            yield from _edges(case, axis, variant)
    made, expected = case.window(), case.window(FORMULA)
    yield _equal("window KV", "values", made.values, expected.values)


def _edges(case: Case, axis: str, variant: Variant) -> Iterator[Check]:
    rows = _edge_rows(variant.dims, case.inputs.device)
    made = case.backend.store(rows, variant)
    yield _equal(axis, f"{variant.name}, edge values", made.values, variant.round_trip(rows))
    if hasattr(case.backend, "bytes_of"):
        expected = torch.cat(quantize(rows.cpu(), variant.record), 1)
        name = f"{variant.name}, bytes of edge values"
        yield _equal(axis, name, case.backend.bytes_of(made), expected)


def _rotated(case: Case) -> Iterator[Check]:
    """What rotates the window's rows before it stores them, and queries in place."""
    rope_store, inputs = getattr(case.backend, "rope_store", None), case.inputs
    if rope_store is None:
        return
    tokens = torch.arange(inputs.tokens, device=inputs.device)
    no_heads = inputs.window_kv[:, None][:, :0]
    _, window = rope_store(no_heads, inputs.window_kv, tokens, case.cos_sin)
    yield _equal("window KV", "values, rotated and stored,", window.values, case.window().values)
    rows = inputs.window_kv[case.positions]
    q, _ = rope_store(inputs.layers[0].q, rows, case.positions, case.cos_sin)
    yield _equal("attention", "values of rotated queries", q, case.q(0))


def _compress(case: Case) -> Iterator[Check]:
    """Against what the back end stores of the formulas' entries: its codec cancels out."""
    compress = getattr(case.backend, "compress", None)
    if compress is None:
        return
    for ratio in (1, 2, 4, 128):
        main = MIXED_FP8 if ratio > 2 else MAIN_FP4
        made = compress(case.inputs, ratio, case.cos_sin, main, INDEX_FP4)
        stored = case.main(main, ratio), case.keys(INDEX_FP4, ratio)
        for axis, ours, theirs in zip(("compression", "index keys"), made, stored, strict=True):
            wrong = (ours.values != theirs.values).any(1).double()
            allowed = max(CODES, FEW / len(wrong))
            name = f"compressed at ratio {ratio}, {ours.variant.record} records that differ"
            yield Check(axis, name, wrong.mean().item(), 0.0, allowed, len(wrong), HELD)


def _index(case: Case) -> Iterator[Check]:
    backend, where = case.backend, case.where()
    queries = case.inputs.layers[0]
    seen = torch.arange(case.size(), device=case.positions.device) < where.n_vis[:, None]
    for variant in (INDEX_BF16, INDEX_FP4, INDEX_FP8):
        if not backend.supports(variant):
            continue
        keys, expected = case.keys(variant), case.keys(variant, backend=FORMULA)
        yield _equal("index keys", f"{variant.name}, values", keys.values, expected.values)
        yield from _edges(case, "index keys", variant)
        query = backend.query(queries.index_q, where, case.cos_sin, variant)
        exact = FORMULA.query(queries.index_q, where, case.cos_sin, variant)
        yield _equal("index queries", f"{variant.name}, values", query.values, exact.values)
        # By formula from the back end's own keys and queries, so that only scoring differs.
        scores = backend.scores(query, keys, queries.index_weights, where)
        own = FORMULA.scores(query, keys, queries.index_weights, where)
        wrong = torch.where(seen, scores - own, 0.0).abs().amax(1)
        largest = torch.where(seen, own, 0.0).abs().amax(1).clamp(min=1e-30)
        worst = (wrong / largest).max().item()
        name = f"{variant.name}, worst of a row's largest"
        yield Check("index scores", name, worst, 0.0, SCORES, len(scores), HELD)
        if variant == INDEX_FP4 and backend.exact_scores:
            yield _exact_scores(case, scores)


def _exact_scores(case: Case, scores: Tensor) -> Check:
    """FP4 scores have one order of sums on every back end: some of them, bit for bit."""
    queries = case.inputs.layers[0]
    count = min(EXACT_ENTRIES, int(case.where().n_vis[-EXACT_ROWS:].min()))
    positions, table = case.positions[-EXACT_ROWS:].cpu(), case.cos_sin.cpu()
    query = index.quantize_query(queries.index_q[-EXACT_ROWS:].cpu(), positions, table)
    keys = quantize(case.entries().keys[:count].cpu(), "IndexFp4")
    exact = index.index_scores_exact(query, *keys, queries.index_weights[-EXACT_ROWS:].cpu())
    made = scores[-EXACT_ROWS:, :count].cpu()
    return _equal("index scores", "sums in the order of every back end, bits", made, exact)


def _choices(case: Case) -> Iterator[Check]:
    backend, where = case.backend, case.where()
    scores = case.scores(0, INDEX_FP4, backend=FORMULA)
    # Rounded to a few values, so that ties decide.
    tied = (TIED * scores / scores.std()).round()
    # Half of k: what is selected inside is the whole pool, and nothing else.
    blocks = max(1, case.k // 2 // POOL_BLOCK)
    for kind, given in (("", scores), (", among ties", tied)):
        pool = FORMULA.pool(given, where, blocks, POOL_BLOCK)
        made = backend.pool(given, where, blocks, POOL_BLOCK)
        yield _equal("pool", f"blocks{kind}", made, pool)
        lists = FORMULA.select(given, where, case.k)
        yield _equal("selection", f"slots{kind}", backend.select(given, where, case.k), lists)
        inside = FORMULA.select(given, where, case.k, pool, POOL_BLOCK)
        made = backend.select(given, where, case.k, pool, POOL_BLOCK)
        yield _equal("selection", f"slots inside a pool{kind}", made, inside)
    backend.reuse(lists.flip(0))  # of a step before
    yield _equal("reuse", "slots that a Reuse layer reads", backend.reuse(lists), lists)


def _fused(case: Case) -> Iterator[Check]:
    """What layers call, scoring and selecting at once and scoring inside a pool alone: against the
    back end's own scores of everything."""
    backend, where, layer = case.backend, case.where(), case.inputs.layers[0]
    if not hasattr(backend, "index_select"):
        return
    query = backend.query(layer.index_q, where, case.cos_sin, INDEX_FP4)
    index = query, case.keys(INDEX_FP4), layer.index_weights, where
    scores = case.scores(0, INDEX_FP4)
    blocks = max(1, 2 * case.k // POOL_BLOCK)  # more than a selection takes
    pool = FORMULA.pool(scores, where, blocks, POOL_BLOCK)
    made, built = backend.index_select(*index, case.k, blocks=blocks)
    yield _equal("pool", "blocks, while scoring,", built, pool)
    lists = FORMULA.select(scores, where, case.k)
    yield _equal("selection", "slots, while scoring,", made, lists)

    offsets = torch.arange(POOL_BLOCK, device=pool.device)
    columns = (pool[:, :, None] * POOL_BLOCK + offsets).flatten(1)
    seen = (columns >= 0) & (columns < where.n_vis[:, None])
    inside = backend.scores_inside(*index, pool)
    everywhere = scores.gather(1, columns.clamp(0, scores.shape[1] - 1))
    yield _equal("reindex", "scores inside a pool, bits", inside[seen], everywhere[seen])
    made, _ = backend.index_select(*index, case.k, pool=pool)
    lists = FORMULA.select(scores, where, case.k, pool, POOL_BLOCK)
    yield _equal("reindex", "slots inside a pool, while scoring,", made, lists)


def _attention(case: Case) -> Iterator[Check]:
    lists, recent = case.teacher(0), case.window_lists()
    sink = _balanced_sink(case)
    for variant in (BF16_MAIN, MAIN_FP4, MAIN_FP8, MIXED_FP8):
        if not case.backend.supports(variant):
            continue
        for name, chosen, window in (
            ("whole lists", lists, recent),
            ("lists of holes but for both ends", _ends(lists), _ends(recent)),
        ):
            expected = FORMULA.attend(
                case.q(0), _same(case.main(variant)), chosen, _same(case.window()), window, sink
            )
            for output, backend in case.backend.outputs().items():
                out = backend.attend(
                    case.q(0), case.main(variant), chosen, case.window(), window, sink
                )
                errors = relative_error(out, expected)
                text = f"{variant.name}, {name}, {output} output, worst row"
                worst, allowed = errors.max().item(), ROUNDING[output]
                yield Check("attention", text, worst, 0.0, allowed, len(errors), HELD)
                if chosen is not lists:
                    continue  # few probabilities: their own rounding shows
                scale = ((out * expected).sum() / expected.square().sum()).item() - 1
                text, allowed = f"{variant.name}, {output} output, bias", BIAS[output]
                yield Check("attention", text, scale, -allowed, allowed, out.numel(), HELD)


def _beside(case: Case) -> Iterator[Check]:
    """What attention does beside its sum: the log of the denominator, joining two halves of a list,
    turning the output back."""
    backend = case.backend.outputs()["FP32"]
    if not hasattr(backend, "attend_part"):
        return
    main, window, sink = case.main(MAIN_FP4), case.window(), _balanced_sink(case)
    q, lists, recent = case.q(0), case.teacher(0), case.window_lists()
    n, half = len(q), lists.shape[1] // 2
    none = torch.full_like(recent, -1)
    given = [(lists, recent), (lists[:, :half], recent), (lists[:, half:], none)]
    (_, lse), *parts = [
        backend.attend_part(q, main, chosen, window, latest) for chosen, latest in given
    ]
    expected = _log_sums(q.float(), main.values, lists, window.values, recent)
    wrong = ((lse - expected).abs() / expected.abs().clamp(min=1)).max().item()
    yield Check("attention", "log of the denominator, worst row", wrong, 0.0, LSE, n, HELD)

    expected = FORMULA.attend(q, _same(main), lists, _same(window), recent, sink)
    worst = relative_error(backend.merge(parts, sink), expected).max().item()
    name = "two halves of the lists joined, FP32 output, worst row"
    yield Check("attention", name, worst, 0.0, ROUNDING["FP32"], n, HELD)

    turn = case.positions, case.cos_sin
    out = backend.attend_back(q, main, lists, window, recent, sink, turn)
    worst = relative_error(out, derotate(expected, *turn)).max().item()
    name = "output turned back, worst row"
    yield Check("attention", name, worst, 0.0, ROUNDING["BF16"], n, HELD)


def _log_sums(q: Tensor, main: Tensor, lists: Tensor, window: Tensor, recent: Tensor) -> Tensor:
    """f32 [Q, H]: log of the sum of exponentials over both lists, row by row."""
    sums = []
    for row, chosen, latest in zip(q, lists, recent, strict=True):
        kv = torch.cat([window[latest[latest >= 0]], main[chosen[chosen >= 0]]])
        sums.append((row @ kv.T * q.shape[2] ** -0.5).logsumexp(1))
    return torch.stack(sums)


def _balanced_sink(case: Case) -> Tensor:
    """f32 [H]: as much as all selected entries together, so that it counts."""
    q, main = case.q(0).float(), case.main(MAIN_FP4, backend=FORMULA).values
    kv = main[case.teacher(0).clamp(min=0)]
    return (q @ kv.transpose(1, 2) * q.shape[2] ** -0.5).logsumexp(2).mean(0)


def _ends(lists: Tensor) -> Tensor:
    """The first and the last two columns, so that every record counts."""
    kept = torch.arange(lists.shape[1], device=lists.device)
    return torch.where((kept < 2) | (kept >= lists.shape[1] - 2), lists, -1)


def _same(stored: Stored) -> Stored:
    """The values that a back end says it stored: what differs then is reading them."""
    return Stored(stored.values, stored.variant)


def _layers(case: Case) -> Iterator[Check]:
    """A whole group, layer after layer and step after step, if the back end has one."""
    group = getattr(case.backend, "group", None)
    if group is None:
        return
    inputs = gaussian(GROUP_TOKENS, GROUP_SHAPE, 0, case.inputs.device)
    small = Case(inputs, GROUP_K)
    chosen, outs = selections(small, inputs.modes, 1.0), group(inputs, GROUP_K, small.cos_sin)
    for mode in dict.fromkeys(inputs.modes):
        errors = [
            relative_error(outs[layer], small.expected(layer, chosen[layer], MAIN_FP4))
            for layer in small.layers
            if inputs.modes[layer] == mode
        ]
        mean = torch.stack(errors).mean().item()
        name = f"{mode} layers, decoded step by step, mean error"
        held = f"normal data, {GROUP_TOKENS} tokens; the library's own group against the formulas"
        yield Check("group", name, mean, 0.0, GROUP, len(errors) * len(small.positions), held)


def _edge_rows(dims: int, device: torch.device) -> Tensor:
    """bf16 [n, dims]: zeros of both signs, ties, lone values, and rows from 2^-30 to 2^12."""
    random = torch.Generator().manual_seed(0)
    sizes = torch.arange(-30, 12)[:, None]
    drawn = torch.randn(len(sizes), dims, generator=random) * sizes.float().exp2()
    ties = torch.tensor([0.25, -0.75, 1.25, -1.75, 2.5, -3.5, 5.0, 6.0]).repeat(dims // 8)[None]
    lone = torch.zeros(4, dims)
    lone[0, 5], lone[1, -1], lone[2, :], lone[3, 0] = 1.0, -3000.0, -0.0, 2.0**-133
    return torch.cat([drawn, ties, ties * 2.0**-9, ties * 448, lone]).bfloat16().to(device)


def _equal(axis: str, name: str, made: Tensor, expected: Tensor) -> Check:
    """Share of elements that differ must be 0: NaN and the sign of zero included."""
    signs = torch.signbit(made) != torch.signbit(expected)
    wrong = ((made != expected) | signs).double().mean().item()
    return Check(axis, f"{name} that differ", wrong, 0.0, 0.0, made.numel(), HELD)
