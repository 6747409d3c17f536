"""Tests that can fail: the report of a comparison, and the comparisons that tests make, given what
a faulty library would give."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import flash_csa as fc
from attend_data import Case, assert_close, random_case, run, selection
from compare import assert_same_bytes, difference
from flash_csa.reference import pages as ref_pages
from flash_csa.reference import quant
from flash_csa.reference.index import IndexQuery, dequantize_query
from index_case import assert_same_list, index_case
from page_views import guarded_pages

pytestmark = pytest.mark.case("Tests that can fail")

# ---- The report


def test_equal_tensors_differ_by_nothing():
    x = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf, -0.0])
    found = difference(x, x.clone())
    assert (found.max_abs, found.rel_l2, found.signed_mean, found.bytes) == (0, 0, 0, 0)
    assert found.of_bytes == 20
    assert difference(x[:0], x[:0]).bytes == 0


def test_a_factor_shows_in_the_norm_though_not_in_the_cosine():
    x = torch.randn(1000)
    assert torch.cosine_similarity(1.1 * x, x, dim=0) > 1 - 1e-6
    assert difference(1.1 * x, x).rel_l2 == pytest.approx(0.1, rel=1e-5)


def test_truncation_shows_in_the_signed_mean():
    """Every error is within one step, and a round trip is loose enough for that."""
    x = torch.rand(10_000) + 1
    rounded = x.bfloat16().float()
    truncated = (x.view(torch.int32) & -(1 << 16)).view(torch.float32)
    assert difference(truncated, x).max_abs <= 2.0**-7
    assert abs(difference(rounded, x).signed_mean) < 2.0**-13
    assert difference(truncated, x).signed_mean < -(2.0**-10)


def test_what_no_bound_sees_shows_in_the_bytes():
    x = torch.zeros(4)
    assert difference(-x, x).max_abs == 0 and difference(-x, x).bytes == 4
    one_nan = torch.tensor([torch.nan, 0, 0, 0])
    assert difference(one_nan, x).max_abs != difference(one_nan, x).max_abs  # NaN, not 0


def test_one_bit_is_enough():
    x = torch.randint(0, 256, (300, 7), dtype=torch.uint8)
    assert_same_bytes(x, x.clone())
    for place in torch.randint(0, x.numel(), (20,)).tolist():
        other = x.clone()
        other.view(-1)[place] ^= 1 << place % 8
        with pytest.raises(AssertionError, match="records: 1 of 2100 bytes differ, max abs"):
            assert_same_bytes(other, x, "records")
    for other in (x[:-1], x.int()):
        with pytest.raises(AssertionError):
            assert_same_bytes(other, x)


# ---- The faults: nibbles swapped, scales shifted by one, sink dropped, no ReLU, a mask off by one,
# a factor of 1.1


def of_the_records(case: Case, fault: Callable) -> Case:
    """The case with main records that `fault` makes of their codes and scales."""
    data, slots = case.main.data.clone(), torch.arange(case.main.num_slots)
    rows = ref_pages.read_rows(data, slots, case.main.record, case.main.page_size)
    rows = quant.Quantized(*fault(*rows))
    ref_pages.write_rows(rows, data, slots, case.main.record, case.main.page_size)
    return replace(case, main=replace(case.main, data=data))


def swapped(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return codes << 4 | codes >> 4, scales


def shifted(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return codes, scales.roll(1, dims=-1)


def one_too_few(case: Case) -> Case:
    chosen = selection(case.selection.slots, (case.selection.lengths - 1).clamp(min=0))
    return replace(case, selection=chosen)


ATTEND_FAULTS = {
    "none": lambda case: run(case),
    "nibbles swapped": lambda case: run(of_the_records(case, swapped)),
    "scales shifted": lambda case: run(of_the_records(case, shifted)),
    "sink dropped": lambda case: run(replace(case, sink=None)),
    "one record too few": lambda case: run(one_too_few(case)),
    "softmax scale x 1.1": lambda case: run(replace(case, softmax_scale=1.1 * case.softmax_scale)),
    "output x 1.1": lambda case: (1.1 * run(case)[0], run(case)[1]),
}


@pytest.mark.parametrize("fault", ATTEND_FAULTS)
def test_attention_bounds_see(fault):
    case = random_case(heads=3, lengths=[200, 64, 5], window_lengths=[128, 3, 0])
    out, lse = ATTEND_FAULTS[fault](case)
    for given in (out, out.bfloat16()):
        if fault == "none":
            assert_close(case, given, lse)
        else:
            with pytest.raises(AssertionError):
                assert_close(case, given, lse)


@pytest.mark.parametrize("fault", [swapped, shifted])
@pytest.mark.parametrize("record", ["MainFp4", "IndexFp4", "WindowFp8", "MixedFp8"])
def test_bytes_of_records_see(record, fault):
    rows = torch.randn(20, fc.RECORDS[record].dims) * torch.exp2(torch.arange(-10.0, 10))[:, None]
    rows[:, ::32] *= 20  # groups differ
    rows[:, 5::64] *= 50
    pages, _ = guarded_pages(1, record, 20)
    slots = torch.arange(20, dtype=torch.int32)
    fc.store(rows.bfloat16(), pages, slots)
    got = ref_pages.read_rows(pages.data, slots, record, 20)
    want = quant.quantize(rows.bfloat16(), record)
    assert_same_bytes(torch.cat(got, 1), torch.cat(want, 1))
    with pytest.raises(AssertionError):
        assert_same_bytes(torch.cat(fault(*got), 1), torch.cat(want, 1), record)


def test_scores_see_a_missing_relu():
    case = index_case([200], [3], heads=8)
    seen, want = case.visible(), case.expected_scores()
    assert_same_bytes(case.scores()[seen], want[seen])
    slots = case.table[0, torch.arange(256) // 64] * 64 + torch.arange(256) % 64
    keys = fc.load(case.index, slots.int(), dtype=torch.float32)
    query = dequantize_query(IndexQuery(case.query.codes, case.query.scales))
    dots = torch.einsum("thd,nd->thn", query, keys)
    faulty = torch.einsum("th,thn->tn", case.weights, dots)
    relu = torch.einsum("th,thn->tn", case.weights, dots.relu())
    assert difference(relu[seen], want[seen]).rel_l2 < 1e-6
    assert difference(faulty[seen], want[seen]).rel_l2 > 0.1


@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
def test_selections_see_a_mask_that_is_off_by_one(ratio):
    case = index_case([ratio * 9 - 1], [1], ratio=ratio, heads=8)
    inclusive, _ = case.index_select(16)
    strict, _ = replace(case, strict=True).index_select(16)
    assert inclusive.lengths.tolist() == [9]
    with pytest.raises(AssertionError):
        assert_same_list(strict, inclusive)
