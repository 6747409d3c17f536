"""Stage by stage: the back end under test against the formulas, on equal inputs.

What is left here is kernel error alone; a fault shows at its own stage, since every stage is fed
with what the formulas made of the ones before.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..reference import index
from ..reference.quant import quantize
from .activations import Shape
from .backends import Stored
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
)
from .metrics import relative_error
from .planted import POOL_BLOCK
from .synthetic import gaussian

HELD = "inputs of the stage, as the formulas made them"
# Of attention, by what it writes: BF16 probabilities and output; sums of another order.
ROUNDING = {"BF16": 6e-3, "FP32": 1e-4}
BIAS = {"BF16": 5e-4, "FP32": 1e-5}  # how far rounding may shrink or stretch an output on average
TIED = 4  # values of a score for each standard deviation, where ties are made
SCORES = 1e-5  # FP32 sums of another order, relative to the row's largest
GROUP = 2e-2  # BF16 output, and entries whose scores differ in the last bit
GROUP_TOKENS, GROUP_K, GROUP_SHAPE = 2048, 256, Shape(layers=6, heads=8, rows=16)
EXACT_ROWS, EXACT_ENTRIES = 4, 2048
CODES, FEW = 0.05, 2  # share, or number, of entries whose pooled value lies on a rounding border


def compare(case: Case) -> list[Check]:
    """All stages of `case.backend`."""
    stages = (_compress, _records, _index, _choices, _attention, _layers)
    return [check for stage in stages for check in stage(case)]


def _records(case: Case) -> Iterator[Check]:
    for variant in (BF16_MAIN, MAIN_FP4, MAIN_FP8, MIXED_FP8):
        if case.backend.supports(variant):
            made, expected = case.main(variant), case.main(variant, backend=FORMULA)
            yield _equal("main KV", f"{variant.name}, values", made.values, expected.values)
            rows = _edge_rows(variant.dims, case.inputs.device)
            made = case.backend.store(rows, variant)
            yield _equal(
                "main KV", f"{variant.name}, edge values", made.values, variant.round_trip(rows)
            )
    made, expected = case.window(), case.window(FORMULA)
    yield _equal("window KV", "values", made.values, expected.values)


def _compress(case: Case) -> Iterator[Check]:
    compress = getattr(case.backend, "compress", None)
    if compress is None:
        return
    for ratio in (1, 2, 4, 128):
        main = MIXED_FP8 if ratio > 2 else MAIN_FP4
        made = compress(case.inputs, ratio, case.cos_sin, main, INDEX_FP4)
        expected = (
            case.main(main, ratio, FORMULA),
            case.keys(INDEX_FP4, ratio, FORMULA),
        )
        for kind, ours, theirs in zip(("main", "index"), made, expected, strict=True):
            wrong = (ours.values != theirs.values).any(1).double()
            allowed = max(CODES, FEW / len(wrong))
            name = f"ratio {ratio}, {kind} records that differ"
            yield Check("compression", name, wrong.mean().item(), 0.0, allowed, len(wrong), HELD)


def _index(case: Case) -> Iterator[Check]:
    backend, where = case.backend, case.where()
    queries = case.inputs.layers[0]
    seen = torch.arange(case.size(), device=case.positions.device) < where.n_vis[:, None]
    for variant in (INDEX_BF16, INDEX_FP4, INDEX_FP8):
        if not backend.supports(variant):
            continue
        keys, expected = case.keys(variant), case.keys(variant, backend=FORMULA)
        yield _equal("index keys", f"{variant.name}, values", keys.values, expected.values)
        rows = _edge_rows(variant.dims, case.inputs.device)
        made = backend.store(rows, variant)
        name = f"{variant.name}, edge values"
        yield _equal("index keys", name, made.values, variant.round_trip(rows))
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
    axes = {"full": "attention", "reuse": "reuse", "reindex": "selection"}
    for mode in dict.fromkeys(inputs.modes):
        errors = [
            relative_error(outs[layer], small.expected(layer, chosen[layer], MAIN_FP4))
            for layer in small.layers
            if inputs.modes[layer] == mode
        ]
        mean = torch.stack(errors).mean().item()
        name = f"{mode} layers of a group, decoded step by step, mean error"
        held = f"normal data, {GROUP_TOKENS} tokens; the library's own group against the formulas"
        yield Check(axes[mode], name, mean, 0.0, GROUP, len(errors) * len(small.positions), held)


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
