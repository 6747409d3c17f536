"""attend where the largest logit moves along a list, further than any that is kept may lag behind.

Tiles and pieces of a list weigh their records against a maximum of their own; which one counts in
the end shows only where they differ.

The weight of the largest logit is 1 and exact in BF16, but where a maximum lags behind: then a row
of a few records points elsewhere.
"""

import math

import pytest
import torch

from attend_data import Case, assert_close, filled_pages, run, selection
from flash_csa import Pages, Window
from flash_csa.reference import pages as reference_pages
from reference_data import randn

WINDOW, SELECTED, LEVEL = 128, 512, 32  # dims 0..31 of record and query make the level of a logit
ORDERS = {  # of the level, by the place in the list
    "rising": lambda at: at // 64,
    "by turns": lambda at: at // 64 % 2,
    "within a tile": lambda at: at % 64 // 8,
    "one peak": lambda at: (at == 389).long() * 4,
}


def leveled_case(heads: int, rows: int, order: str, step: float) -> Case:
    """Logits are small beside their level, which goes up by `step`, and down at odd heads."""
    levels = ORDERS[order](torch.arange(WINDOW + SELECTED)).float()
    kv = randn(WINDOW + SELECTED, 512, seed=1).float()
    kv[:, :LEVEL] = levels[:, None]
    q = randn(rows, heads, 512, seed=2).float() / 4
    q[..., :LEVEL] = step * 512**0.5 / LEVEL
    q[:, 1::2, :LEVEL] *= -1
    window, window_slots = filled_pages("WindowFp8", 64, kv[:WINDOW].bfloat16())
    main, slots = filled_pages("MainFp4", 64, kv[WINDOW:].bfloat16())
    lengths = torch.full((rows,), SELECTED, dtype=torch.int32)
    return Case(
        q=q.bfloat16(),
        main=main,
        selection=selection(slots.repeat(rows, 1), lengths),
        window_pages=window,
        window=Window(window_slots.repeat(rows, 1), torch.full_like(lengths, WINDOW)),
    )


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("step", [4.0, 12.0])
@pytest.mark.parametrize("order", ORDERS)
def test_levels(order, step, heads, batch_invariant, device):
    case = leveled_case(heads, 1, order, step)
    out, lse = run(case, device, dtype=torch.bfloat16, batch_invariant=batch_invariant)
    assert_close(case, out, lse)


@pytest.mark.parametrize("rows", [20, 33, 45, 70])
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_levels_of_many_rows(heads, rows, device):
    """Rows that have fewer workers than tiles; all ask the same."""
    case = leveled_case(heads, 1, "rising", 12.0)
    many = case.rows(torch.zeros(rows, dtype=torch.int64))
    out, lse = run(many, device, dtype=torch.bfloat16)
    for row in (0, rows // 2, rows - 1):
        assert_close(case, out[row : row + 1], lse[row : row + 1])


def test_levels_in_fp32(device):
    case = leveled_case(6, 2, "rising", 12.0)
    assert_close(case, *run(case, device))


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("order", ORDERS)
def test_levels_of_every_entry(order, heads, device):
    """Entries in the order of a block table, which cuts rows that a list leaves whole."""
    page_size = 16
    levels = ORDERS[order](torch.arange(SELECTED)).float()
    kv = randn(SELECTED, 512, seed=1).float()
    kv[:, :LEVEL] = levels[:, None]
    pages = Pages.empty(SELECTED // page_size, "MainFp4", page_size)
    table = torch.randperm(SELECTED // page_size, dtype=torch.int32)[None]
    at = torch.arange(SELECTED)
    slots = table[0, at // page_size].long() * page_size + at % page_size
    reference_pages.store(kv.bfloat16(), pages.data, slots, "MainFp4", page_size)
    q = leveled_case(heads, 3, order, 12.0).q
    request, n_vis = torch.zeros(3, dtype=torch.int32), torch.tensor([512, 390, 65]).int()
    case = Case(q=q, main=pages, contiguous=(table, request, n_vis))
    assert_close(case, *run(case, device, dtype=torch.bfloat16))


# Of the weights of the two largest records, beside a power of two: just below and just above the
# middle of two BF16 numbers, so that they would round away from each other.
MIDDLES = [1 + odd * 2.0**-8 for odd in (1, 3, 5)]
SHARE = 2.0**-11


def alike_case(heads: int, rows: int, place: str, weak: int) -> Case:
    """Rows of `weak` records and, in the tile after them, two alike ones of 2^0 .. 2^7 the weight.

    Dims 0..4 of records and queries make the logits, which have the base 2; `place` is where weak
    records are: in the window, in the window and a tile of holes behind them (rows of two workers
    deal tiles out), in the first of two tiles of a window before a list of eight, or with lesser
    ones in a tile of the selection.
    """
    fillers = 64 - weak if place == "selection" else 0
    kv = randn(weak + fillers + 2, 512, seed=1).float()
    kv[:, :16] = 0
    kv[:, 5] = 3  # so that the scale is 1/2 and 1 a code
    kv[weak : weak + fillers, 0] = 1
    kv[-2:, 1] = 1
    kv[-2, 2] = kv[-1, 3] = 1
    middle = torch.tensor(MIDDLES)[torch.arange(heads) // 8 % len(MIDDLES)]
    q = torch.zeros(rows, heads, 512)
    q[..., 0] = -30
    q[..., 1] = torch.arange(heads) % 8
    q[..., 2] = (middle - SHARE).log2()
    q[..., 3] = (middle + SHARE).log2()
    first = 0 if place == "selection" else weak
    holes = 64 if place == "holes" else 0
    window, window_slots = filled_pages("WindowFp8", 64, kv[: max(first, 1)].bfloat16())
    main, slots = filled_pages("MainFp4", 64, kv[first:].bfloat16())
    lists = torch.full((rows, 512 if place == "models" else 256), -1, dtype=torch.int32)
    lists[:, holes : holes + len(slots)] = slots
    window_lists = torch.full((rows, 128 if place == "models" else 64), -1, dtype=torch.int32)
    window_lists[:, : len(window_slots)] = window_slots
    return Case(
        q=q.bfloat16(),
        main=main,
        selection=selection(lists, torch.full((rows,), holes + len(slots), dtype=torch.int32)),
        window_pages=window,
        window=Window(window_lists, torch.full((rows,), first, dtype=torch.int32)),
        softmax_scale=math.log(2),
    )


@pytest.mark.parametrize("rows", [1, 20, 60, 140])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("weak", [1, 3])
@pytest.mark.parametrize("place", ["window", "holes", "models", "selection"])
def test_largest_weight_is_exact(place, weak, heads, rows, device):
    case = alike_case(heads, 1, place, weak)
    many = case.rows(torch.zeros(rows, dtype=torch.int64))
    out, lse = run(many, device, dtype=torch.bfloat16)
    for row in {0, rows // 2, rows - 1}:
        assert_close(case, out[row : row + 1], lse[row : row + 1])
