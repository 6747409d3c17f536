"""Every reader finds a record where the writer left it: load, attend through each of its lists, and
index_scores, in pages of any size."""

import pytest
import torch

import flash_csa as fc
from attend_data import Case, run, selection
from flash_csa.reference import quant
from flash_csa.reference.layout import RECORDS
from index_case import index_case
from page_views import guarded_pages

TOKENS = 64
PAGE_SIZES = (1, 16, 61, 64)


def token_unique(record: str) -> torch.Tensor:
    """Rows that their record holds exactly, each with its own code and its own scale."""
    r = RECORDS[record]
    token = torch.arange(TOKENS)
    step = r.group if r.scale_kind != "FP32" else 64
    scale = 2.0 ** (token % 8 - 4)
    value = (1 + token // 8 / 8 if r.element == "E4M3" else quant.E2M1[token // 8]) * scale
    x = torch.zeros(TOKENS, r.dims)
    x[:, ::step] = (quant.E4M3[-1] if r.element == "E4M3" else 6.0) * scale[:, None]
    x[:, 1::step] = value[:, None]
    return x


def written(record: str, page_size: int, device) -> tuple[fc.Pages, torch.Tensor, torch.Tensor]:
    """Pages with token t's record at slots[t], in random order, and the rows."""
    x = token_unique(record)
    pages, _ = guarded_pages(-(-TOKENS // page_size), record, page_size, device=device)
    slots = torch.randperm(TOKENS).int()
    fc.store(x.bfloat16().to(device), pages, slots.to(device))
    return pages, slots, x


@pytest.mark.case("Planar versus interleaved record")
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("record", list(RECORDS))
def test_load(record, page_size, device):
    pages, slots, x = written(record, page_size, device)
    got = fc.load(pages, slots.to(device), dtype=torch.float32)
    assert torch.equal(got.cpu(), x)


@pytest.mark.case("Planar versus interleaved record")
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("record", ["MainFp4", "WindowFp8", "MixedFp8"])
@pytest.mark.parametrize("through", ["selection", "window", "contiguous"])
def test_attend(through, record, page_size, device):
    """A row whose only record is token t's gives its values back, whatever the query."""
    pages, slots, x = written(record, page_size, device)
    ones = torch.ones(TOKENS, dtype=torch.int32)
    lists = {}
    if through == "selection":
        lists = {"main": pages, "selection": selection(slots[:, None].contiguous(), ones)}
    elif through == "window":
        lists = {"window_pages": pages, "window": fc.Window(slots[:, None].contiguous(), ones)}
    else:  # the first entry of a request is that at the start of a page
        starts = torch.arange(len(pages.data), dtype=torch.int32)
        x = x[slots.argsort()][::page_size]
        lists = {"main": pages, "contiguous": (starts[:, None], starts, ones[: len(starts)])}
    out, _ = run(Case(q=torch.randn(len(x), 1, 512).bfloat16(), **lists), device)
    assert torch.equal(out[:, 0], x)


@pytest.mark.case("Planar versus interleaved record")
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("record", ["IndexFp4", "IndexFp8"])
def test_index_scores(record, page_size, device):
    """A query that is 1 in one channel scores every key with that channel's value."""
    x = token_unique(record)
    channels = [0, 1, 33, 64, 65, 97]
    case = index_case(
        [TOKENS - 1] * len(channels),
        [1] * len(channels),
        heads=1,
        page_size=page_size,
        record=record,
        device=device,
    )
    case.weights.fill_(1)
    case.table[:] = case.table[:1].clone()
    position = torch.arange(TOKENS)
    slots = case.table[0, position // page_size] * page_size + position % page_size
    fc.store(x.bfloat16(), case.index, slots.int())
    case.query.codes.zero_()
    for row, channel in enumerate(channels):
        if record == "IndexFp4":
            case.query.codes[row, 0, channel // 2] = 0x02 << 4 * (channel % 2)
        else:
            case.query.codes[row, 0, channel] = 0x38
    case.query.scales.fill_(0x7F7F7F7F if record == "IndexFp4" else 1.0)
    assert torch.equal(case.scores()[:, :TOKENS], x[:, channels].T)
