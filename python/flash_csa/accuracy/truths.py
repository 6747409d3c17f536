"""Known truths, on built-in sets of small size: what a sound harness and a sound back end find."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch

from .activations import Shape
from .analytic import expected_error
from .backends import Formula
from .case import FORMULA, Case
from .checks import Check
from .experiments.index_precision import rounded_scores
from .formats import (
    BF16_MAIN,
    INDEX_BF16,
    INDEX_FP4,
    MAIN_FP4,
    MAIN_FP8,
    Variant,
)
from .metrics import covered, found, members, recall, relative_error
from .planted import POOL_BLOCK, planted
from .synthetic import gaussian

TOKENS, K = 4096, 512
SHAPE = Shape(layers=4, heads=8, rows=32, drift=0.3)


def check(backend: Formula, seed: int, device: str) -> list[Check]:
    """All truths, through `backend` where it takes the format."""
    case = Case(gaussian(TOKENS, SHAPE, seed, device), K, backend)
    evidence = Case(planted(TOKENS, SHAPE, seed, device), K, backend)
    still = Case(gaussian(TOKENS, replace(SHAPE, drift=0.0), seed, device), K, backend)
    return [
        *_formats(case),
        *_index(case),
        *_pool(case),
        *_selection(case),
        *_reuse(case, still),
        *_evidence(evidence),
    ]


def _formats(case: Case) -> Iterator[Check]:
    random = torch.Generator(case.inputs.device).manual_seed(1)
    x = torch.randn(2048, 512, generator=random, device=case.inputs.device).bfloat16()
    measured = {}
    for variant in (BF16_MAIN, MAIN_FP8, MAIN_FP4, Variant("E2M1", "UE8M0", 32)):
        backend = case.backend if case.backend.supports(variant) else FORMULA
        wrong = backend.store(x, variant).values - x.float()
        measured[variant] = (wrong.square().sum() / x.float().square().sum()).sqrt().item()
    for axis, variant in (("main KV", MAIN_FP4), ("window KV", MAIN_FP8)):
        ratio = measured[variant] / expected_error(variant)
        name = f"{variant.name}: value error of normal data over its analytic value"
        yield Check(axis, name, ratio, 0.98, 1.02, x.numel(), "N(0, 1) values")
    errors = list(measured.values())
    steps = min(b - a for a, b in pairwise(errors))
    name = "value error grows from BF16 over FP8 and FP4 per 16 to FP4 per 32: least step"
    # The later of its two axes: where FP4 is at fault, main KV has failed already.
    yield Check("window KV", name, steps, 1e-6, math.inf, x.numel(), "N(0, 1) values")


def _index(case: Case) -> Iterator[Check]:
    held = f"normal data, {TOKENS} tokens, top-{K}, FP32 scores of BF16 keys as the teacher"
    rounded, fp4 = [], []
    for layer in case.layers:
        teacher = case.teacher(layer)
        scores = rounded_scores(case, layer, INDEX_BF16, FORMULA)
        lists = FORMULA.select(scores, case.where(), K)
        rounded += (1 - recall(lists, teacher, TOKENS)).tolist()
        queries, where = case.inputs.layers[layer], case.where()
        query = FORMULA.query(queries.index_q, where, case.cos_sin, INDEX_FP4)
        scores = FORMULA.scores(query, case.keys(INDEX_FP4), queries.index_weights, where)
        fp4 += (1 - recall(FORMULA.select(scores, where, K), teacher, TOKENS)).tolist()
    mean = math.fsum(rounded) / len(rounded)
    name = "slots that BF16 rounding of scores changes"
    yield Check("index scores", name, mean, 0.003, 0.007, len(rounded), held)
    more = math.fsum(fp4) / len(fp4)
    yield Check("index keys", "slots that FP4 changes", more, 0.05, 0.2, len(fp4), held)


def _pool(case: Case) -> Iterator[Check]:
    where, scores = case.where(), case.scores(0, INDEX_FP4, backend=FORMULA)
    pool = case.backend.pool(scores, where, TOKENS // POOL_BLOCK, POOL_BLOCK)
    lists = FORMULA.select(scores, where, K, pool, POOL_BLOCK)
    least = recall(lists, FORMULA.select(scores, where, K), TOKENS).min().item()
    name = "recall of a pool that holds everything, worst row"
    yield Check("pool", name, least, 1.0, 1.0, len(lists), "FP4 scores of layer 0")


def _selection(case: Case) -> Iterator[Check]:
    where, mass = case.where(), case.mass(0)
    everything = case.backend.select(mass, where, TOKENS)
    least = covered(mass, everything).min().item()
    name = "attention mass of a selection of everything, worst row"
    yield Check("selection", name, least, 1 - 1e-5, 1 + 1e-5, len(mass), "dense mass of layer 0")
    rows = torch.stack([case.oracle(0), case.teacher(0)])
    gain = (covered(mass, rows[0]) - covered(mass, rows[1])).min().item()
    name = "mass that the oracle covers beyond the index, worst row"
    yield Check("selection", name, gain, -1e-6, 1.0, len(mass), "dense mass of layer 0")
    main = case.main(MAIN_FP4)
    out = case.attend(0, main, everything)
    error = relative_error(out, case.dense(0, variant=MAIN_FP4)).max().item()
    name = "output over a selection of everything against dense attention, worst row"
    yield Check("attention", name, error, 0.0, 6e-3, len(out), "main KV FP4, window FP8")


def _reuse(case: Case, still: Case) -> Iterator[Check]:
    held = "FP4 index and KV; identical queries in all layers, then drifting ones"
    worst = max(_reuse_errors(still))
    name = "output error of Reuse on identical queries, worst row and layer"
    yield Check("reuse", name, worst, 0.0, 0.0, len(still.positions) * len(still.layers), held)
    errors = _reuse_errors(case)
    name = "growth of the output error of Reuse from the first to the last of drifting layers"
    yield Check("reuse", name, errors[-1] - errors[1], 1e-6, math.inf, len(case.positions), held)


def _reuse_errors(case: Case) -> list[float]:
    """Of each layer, the mean over rows of the error that layer 0's selection causes."""
    errors = []
    first = case.backend.select(case.scores(0, INDEX_FP4), case.where(), K)
    case.backend.reuse(first.flip(0))  # of a step before, which must be gone
    for layer in case.layers:
        own = case.backend.select(case.scores(layer, INDEX_FP4), case.where(), K)
        out = case.expected(layer, case.backend.reuse(first), MAIN_FP4)
        errors.append(relative_error(out, case.expected(layer, own, MAIN_FP4)).mean().item())
    return errors


def _evidence(case: Case) -> Iterator[Check]:
    evidence, held = case.inputs.evidence, "needles in normal data; dense mass of layer 0, top-512"
    share = found(case.oracle(0), evidence.needles, 1, TOKENS).double().mean().item()
    yield Check(
        "selection", "needles that the oracle finds", share, 1.0, 1.0, len(case.positions), held
    )
    lists = FORMULA.select(case.scores(0, INDEX_FP4), case.where(), K // 8)
    chosen = members(lists, TOKENS).gather(1, evidence.decoys.clamp(min=0))
    decoys = evidence.decoys >= 0
    wins = (chosen & decoys).sum().item() / max(1, decoys.sum().item())
    name = f"negated decoys among the FP4 index's best {K // 8}"
    yield Check("index scores", name, wins, 0.0, 0.0, int(decoys.sum()), held)
