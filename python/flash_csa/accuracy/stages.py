"""Stage by stage: the back end under test against the formulas, on equal inputs.

What is left here is kernel error alone; a fault shows at its own stage, since every stage is fed
with what the formulas made of the ones before, or compared with what the back end itself makes of
the same by a plainer way. What a back end has beyond `Formula` is compared where it is there:
`Compiled` names it.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from ..plan import INDEX_DIM
from ..reference import index
from ..reference.compress import write_tail
from ..reference.quant import quantize
from ..reference.rope import derotate
from . import codecs, options, v4
from .activations import Activations, Shape
from .backends import Stored, Where
from .case import FORMULA, Case
from .checks import HELD, Check
from .codecs import differ
from .experiments.pool import blocks_of
from .experiments.reuse import selections
from .formats import (
    BF16_MAIN,
    INDEX_BF16,
    INDEX_FP4,
    INDEX_FP8,
    MAIN_FP4,
    MAIN_FP8,
    MIXED_FP8,
)
from .metrics import relative_error
from .planted import POOL_BLOCK, WINDOW
from .synthetic import gaussian

# Of attention, by what it writes: BF16 probabilities and output; sums of another order.
ROUNDING = {"BF16": 6e-3, "FP32": 1e-4}
LSE = 1e-4  # FP32 logits, relative to the larger of 1 and the value
BIAS = {"BF16": 5e-4, "FP32": 1e-5}  # how far rounding may shrink or stretch an output on average
TIED = 4  # values of a score for each standard deviation, where ties are made
SCORES = 1e-5  # FP32 sums of another order, relative to the row's largest
GROUP = 6e-3  # mean: BF16 output, and entries whose scores differ in the last bit
GROUP_WORST = 2e-2
GROUP_TOKENS, GROUP_K, GROUP_SHAPE = 2048, 256, Shape(layers=6, heads=8, rows=16)
GROUP_POOL = 1 / 4  # of the context: less than there is, more than is selected
EXACT_ROWS, EXACT_ENTRIES = 4, 2048
CODES, FEW = 0.02, 2  # share, or number, of entries whose pooled value lies on a rounding border
# Relative error of such an entry; the scale of an index key changes by a factor of two.
BORDER = {"compression": 0.1, "index keys": 0.25}
SEEN_TOKENS, SEEN_STEP, POOL = 240, 3, 2  # rows that share no request; blocks
LONG, LONG_ROWS = 40_000, (39_999, 33_000)  # entries; positions
CHUNK_TOKENS, CHUNK_START = 2048, 119  # rows that do: they cross a pool block and fill a window


def compare(case: Case) -> list[Check]:
    """All stages of `case.backend`."""
    stages = (_step, _visible, _turned, _compress, codecs.compare, _rotated)
    of_rows = (_index, _choices, _fused, _attention)
    checks = [check for stage in (*stages, *of_rows) for check in stage(case)]
    chunks = _chunks(case)
    for stage in of_rows:
        checks += (replace(c, name=f"chunks of rows: {c.name}") for c in stage(chunks))
    last = (_long, options.compare, v4.compare, _beside, _layers)
    return [*checks, *(check for stage in last for check in stage(case))]


def _chunks(case: Case) -> Case:
    """The same queries at the first tokens, around one pool block, and at the end: rows that share
    a request, and of which some see less than they may select."""
    inputs = case.inputs
    tokens, rows = min(CHUNK_TOKENS, inputs.tokens), len(inputs.positions)
    third = rows // 3
    starts = (0, third), (CHUNK_START, third), (tokens - rows + 2 * third, rows - 2 * third)
    positions = [torch.arange(first, first + count) for first, count in starts]
    made = replace(
        inputs,
        positions=torch.cat(positions).to(inputs.device),
        kv=inputs.kv[:tokens],
        gate=inputs.gate[:tokens],
        window_kv=inputs.window_kv[:tokens],
    )
    return Case(made, case.k, case.backend)


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
            yield _equal("visibility and slots", "positions of the window", recent, lists)
        ends = (positions + 1) % ratio == 0
        entries = torch.where(ends, positions // ratio, -1)
        yield _equal(
            "visibility and slots", f"ratio {ratio}, entries that rows close,", closed, entries
        )
        name = f"ratio {ratio}, numbers of visible entries"
        yield _equal("visibility and slots", name, seen, Where(positions, ratio).n_vis)
        _, _, seen = step(positions, ratio, strict=True)
        expected = Where(positions, ratio, strict=True).n_vis
        yield _equal("visibility and slots", f"{name}, strict,", seen, expected)


def _visible(case: Case) -> Iterator[Check]:
    """Entries that rows see, as the ops find for themselves: those that they score, and those that
    they select where all may be selected."""
    visible, queries = getattr(case.backend, "visible", None), case.inputs.layers[0]
    if visible is None:
        return
    positions = torch.arange(0, SEEN_TOKENS - 1, SEEN_STEP, device=case.inputs.device)
    rows = torch.arange(len(positions), device=positions.device) % len(queries.index_q)
    for ratio, strict in product((1, 2, 4), (False, True)):
        where = Where(positions, ratio, strict)
        entries = case.entries(ratio).keys[: SEEN_TOKENS // ratio]
        query = case.backend.query(queries.index_q[rows], where, case.cos_sin, INDEX_FP4)
        keys = case.backend.store(entries, INDEX_FP4)
        seen = torch.arange(len(entries), device=rows.device) < where.n_vis[:, None]
        found = visible(query, keys, queries.index_weights[rows], where)
        # What one of the two has wrong alone is scoring, or selection.
        scored, listed = ((made != seen).any(1) for made in found)
        wrong = (scored & listed).double().mean().item()
        kind = f"ratio {ratio}{', strict' * strict}"
        name = f"{kind}, rows that score and select other entries than the visible"
        yield Check("visibility and slots", name, wrong, 0.0, 0.0, len(rows), HELD)
        name = f"{kind}, rows that select other entries than the visible, while scoring"
        yield Check("selection", name, listed.double().mean().item(), 0.0, 0.0, len(rows), HELD)
        given = torch.zeros(seen.shape, device=rows.device), where
        lists, pools = zip(
            *(
                (each.select(*given, seen.shape[1]), each.pool(*given, POOL, POOL_BLOCK))
                for each in (case.backend, FORMULA)
            ),
            strict=True,
        )
        yield _equal("selection", f"{kind}, slots of equal scores", *lists)
        yield _equal("pool", f"{kind}, blocks of equal scores", *pools)


def _turned(case: Case) -> Iterator[Check]:
    """Whether what is wrong with a rotated vector is so with all of them."""
    backend, inputs = case.backend, case.inputs
    if not hasattr(backend, "rope_store"):
        return
    rows, layer = inputs.window_kv[case.positions], inputs.layers[0]
    q, window = backend.rope_store(layer.q, rows, case.positions, case.cos_sin)
    index_q = layer.index_q, case.where(), case.cos_sin, INDEX_FP4
    wrong = (
        differ(q, case.q(0)),
        differ(window.values, case.window(FORMULA).values[case.positions]),
        differ(backend.query(*index_q).values, FORMULA.query(*index_q).values),
    )
    name = "rotated values that differ, least share of the three"
    axis = "RoPE of queries, window and index"
    yield Check(axis, name, min(wrong), 0.0, 0.0, len(rows), HELD)


def _rotated(case: Case) -> Iterator[Check]:
    """The window as attention reads it, and what rotates its rows before it stores them, and
    queries in place."""
    made, expected = case.window(), case.window(FORMULA)
    yield _equal("window KV", "values", made.values, expected.values)
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


class _Uneven(Activations):
    """Inputs of which no part is like another: norm weights, position biases, both roles of an
    overlapping token, and groups so small that eps counts."""

    @classmethod
    def of(cls, inputs: Activations) -> "_Uneven":
        random = torch.Generator().manual_seed(0)
        sizes = torch.where(torch.arange(inputs.tokens) // 128 % 2 == 0, 1.0, 2.0**-10)
        weights = [
            (0.5 + torch.rand(len(each), generator=random)).to(inputs.device)
            for each in (inputs.norm_weight, inputs.key_norm_weight)
        ]
        fields = vars(inputs) | {"kv": inputs.kv * sizes[:, None].to(inputs.device)}
        return cls(**fields | {"norm_weight": weights[0], "key_norm_weight": weights[1]})

    def compressed(self, ratio: int) -> tuple[Tensor, Tensor | None]:
        kv, gate = super().compressed(ratio)
        if ratio != 4:
            return kv, gate
        return tuple(torch.cat([x.flip(1), x], 1) for x in (self.kv, self.gate))

    def bias(self, ratio: int) -> Tensor | None:
        if ratio < 4:
            return None
        random = torch.Generator().manual_seed(ratio)
        made = torch.randn(ratio, self.compressed(ratio)[0].shape[1], generator=random)
        return made.to(self.device)


def _compress(case: Case) -> Iterator[Check]:
    """Against the formulas' entries as records, and as the back end stores them, whichever is
    nearer: its codec cancels out, wherever it is wrong."""
    compress = getattr(case.backend, "compress", None)
    if compress is None:
        return
    inputs = _Uneven.of(case.inputs)
    for ratio in (1, 2, 4, 128):
        variants = MIXED_FP8 if ratio > 2 else MAIN_FP4, INDEX_FP4
        made = compress(inputs, ratio, case.cos_sin, *variants)
        whole = compress(inputs, ratio, case.cos_sin, *variants, chunks=(inputs.tokens,))
        entries = inputs.entries(ratio, case.cos_sin)
        axes, rows = ("compression", "index keys"), (entries.main, entries.keys)
        for axis, variant, ours, once, row in zip(axes, variants, made, whole, rows, strict=True):
            own = case.backend.store(row, variant).values
            exact = variant.round_trip(row)
            errors = torch.minimum(*(relative_error(ours.values, each) for each in (own, exact)))
            wrong = (errors > 0).double()
            allowed = max(CODES, FEW / len(wrong))
            name = f"compressed at ratio {ratio}, {variant.record} records"
            yield Check(
                axis, f"{name} that differ", wrong.mean().item(), 0.0, allowed, len(wrong), HELD
            )
            worst = errors.max().item()
            yield Check(axis, f"{name}, worst error", worst, 0.0, BORDER[axis], len(wrong), HELD)
            yield _equal(axis, f"{name}, in chunks and at once,", ours.values, once.values)
        if ratio > 1:
            yield _tail(case, ratio, *inputs.compressed(ratio))


def _tail(case: Case, ratio: int, kv: Tensor, gate: Tensor) -> Check:
    """Where what follows, or a copy of the cache, finds the rows of the open group."""
    rows = 3 * ratio // 2 + 3
    kept = case.backend.tail(kv[:rows], gate[:rows], ratio, case.cos_sin).cpu()
    expected = torch.full_like(kept, torch.nan)
    write_tail(expected, kv[:rows].cpu(), gate[:rows].cpu(), 0)
    name = f"ratio {ratio}, tail rows"
    return _equal("compression", name, kept.nan_to_num(), expected.nan_to_num())


def _index(case: Case) -> Iterator[Check]:
    backend, where = case.backend, case.where()
    queries = case.inputs.layers[0]
    seen = torch.arange(case.size(), device=case.positions.device) < where.n_vis[:, None]
    for variant in (INDEX_BF16, INDEX_FP4, INDEX_FP8):
        if not backend.supports(variant):
            continue
        keys = case.keys(variant)
        query = backend.query(queries.index_q, where, case.cos_sin, variant)
        exact = FORMULA.query(queries.index_q, where, case.cos_sin, variant)
        yield _equal("index queries", f"{variant.name}, values", query.values, exact.values)
        # By formula from the back end's own keys and queries, so that only scoring differs.
        scores = backend.scores(query, keys, queries.index_weights, where)
        own = FORMULA.scores(query, keys, queries.index_weights, where)
        wrong = torch.where(seen, scores - own, 0.0).abs().amax(1)
        largest = torch.where(seen, own, 0.0).abs().amax(1)
        largest = largest.clamp(min=largest.max() / 100)  # of a row's few, all may cancel
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
        built = backend.pool(given, where, blocks, POOL_BLOCK)
        lists = FORMULA.select(given, where, case.k)
        yield from _chosen(kind, built, pool, backend.select(given, where, case.k), lists)
        inside = FORMULA.select(given, where, case.k, pool, POOL_BLOCK)
        made = backend.select(given, where, case.k, pool, POOL_BLOCK)
        yield _equal("reindex", f"slots inside a pool{kind}", made, inside)
    backend.reuse(lists.flip(0))  # of a step before
    yield _equal("reuse", "slots that a Reuse layer reads", backend.reuse(lists), lists)


def _chosen(kind: str, built: Tensor, pool: Tensor, made: Tensor, lists: Tensor) -> Iterator[Check]:
    """Blocks `built` and slots `made` of the same scores: what is wrong in both, they share."""
    share = min(differ(built, pool), differ(made, lists))
    name = f"blocks and slots{kind} that differ, the lesser share"
    yield Check("top-k of pool and selection", name, share, 0.0, 0.0, made.numel(), HELD)
    yield _equal("pool", f"blocks{kind}", built, pool)
    yield _equal("selection", f"slots{kind}", made, lists)


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
    lists = FORMULA.select(scores, where, case.k)
    yield from _chosen(", while scoring,", built, pool, made, lists)

    offsets = torch.arange(POOL_BLOCK, device=pool.device)
    columns = (pool[:, :, None] * POOL_BLOCK + offsets).flatten(1)
    seen = (columns >= 0) & (columns < where.n_vis[:, None])
    inside = backend.scores_inside(*index, pool)
    everywhere = scores.gather(1, columns.clamp(0, scores.shape[1] - 1))
    yield _equal("reindex", "scores inside a pool, bits", inside[seen], everywhere[seen])
    made, _ = backend.index_select(*index, case.k, pool=pool)
    lists = FORMULA.select(scores, where, case.k, pool, POOL_BLOCK)
    yield _equal("reindex", "slots inside a pool, while scoring,", made, lists)


def _long(case: Case) -> Iterator[Check]:
    """Rows so long that back ends cut them, whatever the case's own length."""
    backend, inputs = case.backend, case.inputs
    if not hasattr(backend, "index_select"):
        return
    random = torch.Generator().manual_seed(0)
    keys = torch.randn(LONG, INDEX_DIM, generator=random).bfloat16().to(inputs.device)
    held, layer, rows = backend.store(keys, INDEX_FP4), inputs.layers[0], slice(0, len(LONG_ROWS))
    query = backend.query(
        layer.index_q[rows], Where(case.positions[rows], 1), case.cos_sin, INDEX_FP4
    )
    where = Where(torch.tensor(LONG_ROWS, device=inputs.device), 1)
    given = query, held, layer.index_weights[rows], where
    made, own = backend.scores(*given), FORMULA.scores(*given)
    seen = torch.arange(LONG, device=made.device) < where.n_vis[:, None]
    worst = torch.where(seen, made - own, 0.0).abs().max() / own.abs().max()
    name = f"{LONG:,} entries, worst of the largest"
    yield Check("index scores", name, worst.item(), 0.0, SCORES, len(made), HELD)
    blocks = max(1, 2 * case.k // POOL_BLOCK)
    lists = FORMULA.select(made, where, case.k)
    pool = FORMULA.pool(made, where, blocks, POOL_BLOCK)
    for name, chosen, built in (
        (
            "",
            backend.select(made, where, case.k),
            backend.pool(made, where, blocks, POOL_BLOCK),
        ),
        (", while scoring", *backend.index_select(*given, case.k, blocks=blocks)),
    ):
        yield from _chosen(f" of {LONG:,} entries{name},", built, pool, chosen, lists)


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
    halves = lists[:, :half], lists[:, half:], torch.full_like(lists, -1)
    parts = [
        backend.attend_part(q, main, chosen, window, latest)
        for chosen, latest in zip(halves, (recent, none, none), strict=True)
    ]
    for name, scale in (("", 1.0), (", at half the scale", 0.5)):
        options = {"softmax_scale": scale * q.shape[2] ** -0.5}
        _, lse = backend.attend_part(q, main, lists, window, recent, **options)
        expected = _log_sums(scale * q.float(), main.values, lists, window.values, recent)
        wrong = ((lse - expected).abs() / expected.abs().clamp(min=1)).max().item()
        name = f"log of the denominator{name}, worst row"
        yield Check("attention", name, wrong, 0.0, LSE, n, HELD)

    expected = FORMULA.attend(q, _same(main), lists, _same(window), recent, sink)
    joined, lse = backend.merge(parts, sink)
    worst = relative_error(joined, expected).max().item()
    name = "two halves of the lists, and nothing, joined, FP32 output, worst row"
    yield Check("attention", name, worst, 0.0, ROUNDING["FP32"], n, HELD)
    expected = _log_sums(q.float(), main.values, lists, window.values, recent)
    worst = ((lse - expected).abs() / expected.abs().clamp(min=1)).max().item()
    name = "two halves joined, log of the denominator, worst row"
    yield Check("attention", name, worst, 0.0, LSE, n, HELD)

    # More than kernels take at once, and no multiple of anything.
    many = torch.cat([case.q(layer) for layer in case.layers], 1)[:, :-1].contiguous()
    sinks = torch.cat([sink + layer for layer in case.layers])[:-1]
    out = backend.attend(many, main, lists, window, recent, sinks)
    expected = FORMULA.attend(many, _same(main), lists, _same(window), recent, sinks)
    worst = relative_error(out, expected).max().item()
    name = f"{many.shape[1]} heads, FP32 output, worst row"
    yield Check("attention", name, worst, 0.0, ROUNDING["FP32"], n, HELD)

    turn = case.positions, case.cos_sin
    expected = FORMULA.attend(q, _same(main), lists, _same(window), recent, sink)
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
    """A whole group, layer after layer and step after step, if the back end has one; layers of each
    mode for themselves."""
    group = getattr(case.backend, "group", None)
    if group is None:
        return
    inputs = gaussian(GROUP_TOKENS, GROUP_SHAPE, 0, case.inputs.device)
    small = Case(inputs, GROUP_K)
    chosen = selections(small, inputs.modes, GROUP_POOL)
    outs = group(inputs, GROUP_K, blocks_of(small, GROUP_POOL, POOL_BLOCK), small.cos_sin)
    held = f"normal data, {GROUP_TOKENS} tokens; the library's own group against the formulas"
    modes = {"full": "group", "reindex": "reindex in a group", "reuse": "reuse in a group"}
    for mode, axis in modes.items():
        errors = torch.cat(
            [
                relative_error(outs[layer], small.expected(layer, chosen[layer], MAIN_FP4))
                for layer in small.layers
                if inputs.modes[layer] == mode
            ]
        )
        found = errors.mean().item(), errors.max().item()
        for what, value, allowed in zip(
            ("mean", "worst"), found, (GROUP, GROUP_WORST), strict=True
        ):
            name = f"{mode} layers, decoded step by step, {what} error"
            yield Check(axis, name, value, 0.0, allowed, len(errors), held)


def _equal(axis: str, name: str, made: Tensor, expected: Tensor) -> Check:
    """Share of elements that differ must be 0: NaN and the sign of zero included."""
    wrong = differ(made, expected)
    return Check(axis, f"{name} that differ", wrong, 0.0, 0.0, made.numel(), HELD)
