"""Accuracy: measures and back ends on cases whose answer is known."""

import pytest
import torch

from flash_csa.accuracy import Shape
from flash_csa.accuracy.backends import Formula, Stored, Where
from flash_csa.accuracy.case import FORMULA, Case
from flash_csa.accuracy.compiled import Compiled
from flash_csa.accuracy.formats import (
    BF16_MAIN,
    INDEX_BF16,
    INDEX_FP4,
    INDEX_FP8,
    MAIN_FP4,
    MAIN_FP8,
    MIXED_FP8,
)
from flash_csa.accuracy.metrics import (
    answered,
    boundary_gap,
    covered,
    found,
    jaccard,
    recall,
    relative_error,
)
from flash_csa.accuracy.planted import planted
from flash_csa.accuracy.synthetic import gaussian, heavy
from flash_csa.reference import attend as core
from flash_csa.reference import index as reference_index
from flash_csa.reference import select as reference_select

SHAPE = Shape(layers=2, heads=4, index_heads=8, rows=12)


def lists(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def test_measures_of_lists():
    got, wanted = lists([0, 3, 5, -1], [1, 2, -1, -1]), lists([3, 5, 7, 9], [-1, -1, -1, -1])
    assert recall(got, wanted, 10).tolist() == [0.5, 1.0]
    assert jaccard(got, wanted, 10).tolist() == pytest.approx([2 / 5, 0.0])
    assert jaccard(wanted[1:], wanted[1:], 10).tolist() == [1.0]
    mass = torch.arange(10.0).expand(2, 10) / 45
    assert covered(mass, got).tolist() == pytest.approx([8 / 45, 3 / 45])
    assert found(lists([2, 4]), lists([5, 9]), 2, 8).tolist() == [True]
    assert found(lists([2, 3]), lists([5, 9]), 2, 8).tolist() == [False]


def test_relative_error():
    expected = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    assert relative_error(expected + torch.tensor([0.0, 0.5]), expected).tolist() == pytest.approx(
        [0.1, 0.5]
    )


def test_boundary_gap():
    scores = torch.tensor([[4.0, 1.0, 3.0, 0.0, 100.0], [4.0, 1.0, 3.0, 0.0, 100.0]])
    visible = torch.tensor([4, 2])
    gap = boundary_gap(scores, visible, 2)
    assert float(gap[0]) == pytest.approx(2.0 / torch.tensor([4.0, 1.0, 3.0, 0.0]).std())
    assert gap[1].isnan()  # nothing is left out
    assert boundary_gap(scores, visible, 5).isnan().all()


def test_selection_is_the_references():
    random = torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 4, (20, 333), generator=random).float()
    scores[3, 5:9] = torch.nan
    scores[4] = -0.0
    positions = torch.arange(20) * 17
    where = Where(positions, 1)
    for k in (1, 7, 64, 333):
        expected = reference_select.select(scores, where.n_vis, k)
        assert torch.equal(FORMULA.select(scores, where, k), expected.positions.long())
    scores = scores.nan_to_num(0.0)
    for blocks in (1, 5, 60):
        expected = reference_select.build_pool(scores, where.n_vis, blocks)
        pool = FORMULA.pool(scores, where, blocks, 8)
        assert torch.equal(pool, expected.blocks.long())
        inside = reference_select.select(scores, where.n_vis, 16, expected)
        assert torch.equal(FORMULA.select(scores, where, 16, pool, 8), inside.positions.long())


def test_scores_and_attention_are_the_references():
    case = Case(heavy(512, SHAPE, 0), 64)
    queries, where = case.inputs.layers[1], case.where()
    query = FORMULA.query(queries.index_q, where, case.cos_sin, INDEX_FP4)
    exact = reference_index.quantize_query(queries.index_q, case.positions, case.cos_sin)
    assert torch.equal(query.values, reference_index.dequantize_query(exact))
    keys = case.keys(INDEX_FP4).values
    scores = reference_index.index_scores(query.values, keys, queries.index_weights)
    made = case.scores(1, INDEX_FP4)
    assert float((made - scores).abs().max() / scores.abs().max()) < 1e-6

    chosen, window = case.teacher(1), case.window_lists()
    records, joined = core.join(case.window().values, window, case.main().values, chosen)
    out, _ = core.attend(case.q(1), records, joined, sink=queries.sink)
    assert float(relative_error(case.attend(1, case.main(), chosen), out).max()) < 1e-5
    everything = FORMULA.select(case.mass(1), where, 512)
    dense = case.attend(1, case.main(BF16_MAIN), everything)
    assert float(relative_error(dense, case.dense(1)).max()) < 1e-5


def test_mass_is_attention():
    case = Case(gaussian(256, SHAPE, 0), 32)
    mass = case.mass(0)
    assert mass.sum(1).tolist() == pytest.approx([1.0] * len(mass), abs=1e-5)
    hidden = torch.arange(256) >= case.where().n_vis[:, None]
    assert (mass[hidden] == 0).all()
    best = covered(mass, case.oracle(0))
    for layer in case.layers:
        assert (best >= covered(mass, case.teacher(layer)) - 1e-6).all()


@pytest.mark.parametrize("variant", [MAIN_FP4, MAIN_FP8, MIXED_FP8], ids=lambda v: v.name)
def test_compiled_records_and_attention(variant):
    case = Case(heavy(700, SHAPE, 0), 64, Compiled())
    assert torch.equal(case.main(variant).values, case.main(variant, backend=FORMULA).values)
    chosen = case.teacher(0)
    out = case.attend(0, case.main(variant), chosen)
    expected = case.attend(0, case.main(variant, backend=FORMULA), chosen, FORMULA)
    assert float(relative_error(out, expected).max()) < 6e-3


@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
def test_compiled_choices(ratio):
    case = Case(gaussian(1500, SHAPE, 0), 64, Compiled())
    where = case.where(ratio)
    for variant in (INDEX_FP4, INDEX_FP8):
        scores = case.scores(0, variant, ratio)
        exact = case.scores(0, variant, ratio, FORMULA)
        seen = torch.arange(case.size(ratio)) < where.n_vis[:, None]
        wrong = torch.where(seen, scores - exact, 0.0).abs().max()
        assert float(wrong / exact.abs().max()) < 1e-5
    pool = case.backend.pool(exact, where, 40, 8)
    assert torch.equal(pool, FORMULA.pool(exact, where, 40, 8))
    for inside in (None, pool):
        made = case.backend.select(exact, where, 64, inside, 8)
        assert torch.equal(made, FORMULA.select(exact, where, 64, inside, 8))


def test_compiled_takes_no_other_blocks():
    case = Case(gaussian(256, SHAPE, 0), 8, Compiled())
    assert not case.backend.supports(BF16_MAIN) and not case.backend.supports(INDEX_BF16)
    with pytest.raises(ValueError, match="blocks of 8, got 4"):
        case.backend.pool(case.scores(0, INDEX_FP4), case.where(), 4, 4)


def test_oracle_finds_needles_and_reads_them():
    case = Case(planted(2048, Shape(layers=1, heads=8, rows=64), 0), 128)
    evidence = case.inputs.evidence
    chosen = case.oracle(0)
    assert found(chosen, evidence.needles, 1, 2048).all()
    out = case.expected(0, chosen)
    assert answered(out, evidence).all()
    # Without its needles no row can answer, unless they lie in the window.
    hidden = torch.where(torch.isin(chosen, evidence.needles), -1, chosen)
    outside = (case.positions[:, None] - evidence.needles).amin(1) >= 128
    assert not answered(case.expected(0, hidden), evidence)[outside].any()


class Folded(Formula):
    """Forgets the ReLU's sign: takes the magnitude of a dot product."""

    name = "folded"

    def scores(self, query: Stored, keys: Stored, weights, where):
        rows = [
            weight @ (heads @ keys.values.T).abs()
            for heads, weight in zip(query.values, weights, strict=True)
        ]
        return torch.stack(rows)


def test_negated_decoy_must_not_win():
    """A decoy of the opposite sign scores lowest, unless the sign is lost."""
    inputs = planted(2048, Shape(layers=1, heads=8, rows=64), 0)
    decoys = inputs.evidence.decoys[:, :1]
    present = decoys[:, 0] >= 0
    assert present.sum() == 16
    for backend, chosen in ((FORMULA, 0), (Folded(), 8)):
        case = Case(inputs, 64, backend)
        lists = backend.select(case.scores(0, INDEX_FP4), case.where(), 64)
        hits = int((lists == decoys)[present].any(1).sum())
        assert hits == 0 if chosen == 0 else hits >= chosen
