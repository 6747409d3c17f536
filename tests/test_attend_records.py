"""attend: whole rows of every pair of records, for which kernels are chosen that know them."""

from dataclasses import replace

import pytest
import torch

from attend_data import EITHER_LIST, assert_close, random_case, run, same


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize(("main", "window"), EITHER_LIST)
def test_every_record_in_whole_rows(main, window, heads, device):
    """Where no row is cut, a kernel may be one that is made for some records alone."""
    case = random_case(heads=heads, main=main, window=window)
    assert_close(case, *run(case, device, dtype=torch.bfloat16, batch_invariant=True))


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("other", ["MainFp4", "WindowFp8", "MixedFp8"])
@pytest.mark.parametrize("record", ["MainFp4", "WindowFp8", "MixedFp8"])
def test_records_of_a_list_without_any_do_not_matter(record, other, heads, device):
    """The other list names records that are there, all behind its length of 0."""
    case = random_case(heads=heads, main=(record, 64), window=None)
    beside = random_case(heads=heads, main=None, window=(other, 64), window_lengths=[128] * 4)
    none = replace(beside.window, lengths=torch.zeros_like(beside.window.lengths))
    both = replace(case, window_pages=beside.window_pages, window=none)
    options = {"dtype": torch.bfloat16, "batch_invariant": True}
    assert same(run(both, device, **options), run(case, device, **options))
