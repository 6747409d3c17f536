"""Stage by stage: the back end under test against the formulas, on equal inputs.

What is left here is kernel error alone; a fault shows at its own stage, since every stage is fed
with what the formulas made of the ones before.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

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
ROUNDING = 6e-3  # BF16 probabilities and sums of another order
SCORES = 1e-5  # FP32 sums of another order, relative to the row's largest
GROUP = 2e-2  # BF16 output, and entries whose scores differ in the last bit
GROUP_TOKENS, GROUP_K, GROUP_SHAPE = 2048, 256, Shape(layers=6, heads=8, rows=16)
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


def _choices(case: Case) -> Iterator[Check]:
    backend, where = case.backend, case.where()
    scores = case.scores(0, INDEX_FP4, backend=FORMULA)
    # Half of k: what is selected inside is the whole pool, and nothing else.
    blocks = max(1, case.k // 2 // POOL_BLOCK)
    pool = FORMULA.pool(scores, where, blocks, POOL_BLOCK)
    made = backend.pool(scores, where, blocks, POOL_BLOCK)
    yield _equal("pool", "blocks", made, pool)
    lists = FORMULA.select(scores, where, case.k)
    yield _equal("selection", "slots", backend.select(scores, where, case.k), lists)
    inside = FORMULA.select(scores, where, case.k, pool, POOL_BLOCK)
    made = backend.select(scores, where, case.k, pool, POOL_BLOCK)
    yield _equal("selection", "slots inside a pool", made, inside)
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
            out = case.backend.attend(
                case.q(0), case.main(variant), chosen, case.window(), window, sink
            )
            errors = relative_error(out, expected)
            text = f"{variant.name}, {name}, worst row"
            yield Check("attention", text, errors.max().item(), 0.0, ROUNDING, len(errors), HELD)


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


def _equal(axis: str, name: str, made: Tensor, expected: Tensor) -> Check:
    """Share of elements that differ, NaN included, must be 0."""
    wrong = (made != expected).double().mean().item()
    return Check(axis, f"{name} that differ", wrong, 0.0, 0.0, made.numel(), HELD)
