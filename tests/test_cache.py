"""Page geometry, separate storages, and who owns which page when."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_csa import configs
from flash_csa.cache import BlockPool, CacheSpec, OutOfPages
from flash_csa.plan import LayerPlan

V41 = LayerPlan.from_config(configs.V41_FLASH)
V4 = LayerPlan.from_config(configs.V4_FLASH)


def storages(cache) -> list[torch.Tensor]:
    pages = [pages for group in cache.groups for pages in (group.main, group.index) if pages]
    tails = [tail.rows for pair in cache.tails for tail in (pair.main, pair.index) if tail]
    return [entry.data for entry in (*pages, *cache.window)] + tails


def test_v41_cache():
    cache = CacheSpec().allocate(V41, max_tokens=1000, max_requests=3)
    layout = cache.layout
    assert (layout.span_tokens, layout.spans_per_request, layout.num_spans) == (128, 8, 24)
    assert (layout.num_pages(1), layout.num_pages(2)) == (48, 24)
    assert (layout.max_pages(1), layout.max_entries(1), layout.max_entries(2)) == (16, 1024, 512)
    assert [tuple(group.main.data.shape) for group in cache.groups] == [(24, 64 * 288)] * 3 + [
        (48, 64 * 288)
    ]
    assert [tuple(group.index.data.shape) for group in cache.groups] == [(24, 64 * 68)] * 3 + [
        (48, 64 * 68)
    ]
    assert [tuple(pages.data.shape) for pages in cache.window] == [(6, 64 * 528)] * 40
    assert [tuple(pair.main.rows.shape) for pair in cache.tails[:3]] == [(3, 2, 2, 512)] * 3
    assert cache.tails[3].main is None
    assert all(pair.index is None for pair in cache.tails)
    assert cache.nbytes == {
        "main": 3 * 1024 * 720,
        "index": 3 * 1024 * 170,
        "window": 3 * 2_703_360,
        "tails": 3 * 3 * 8192,
    }


def test_v4_cache():
    cache = CacheSpec.for_plan(V4).allocate(V4, max_tokens=1025, max_draft=3)
    layout = cache.layout
    assert (layout.span_tokens, layout.spans_per_request) == (1024, 2)
    assert (layout.num_pages(4), layout.num_pages(128)) == (8, 2)
    csa, hca = cache.groups[:2]
    # 64 records of 584 bytes are 64.9 units of 576 bytes, 8 records are 8.1.
    assert tuple(csa.main.data.shape) == (8, 65 * 576)
    assert tuple(csa.index.data.shape) == (8, 64 * 68)
    assert tuple(hca.main.data.shape) == (2, 9 * 576)
    assert hca.index is None
    assert csa.main.record == cache.window[0].record == "MixedFp8"
    assert tuple(cache.tails[0].main.rows.shape) == (1, 2, 8 + 3, 1024)
    assert tuple(cache.tails[0].index.rows.shape) == (1, 2, 8 + 3, 256)
    assert tuple(cache.tails[1].main.rows.shape) == (1, 2, 128 + 3, 512)
    assert cache.tails[1].index is None


def test_every_tensor_has_a_storage_of_its_own():
    for plan in (V41, V4):
        cache = CacheSpec.for_plan(plan).allocate(plan, max_tokens=1)
        tensors = storages(cache)
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
        assert sum(tensor.nbytes for tensor in tensors) == sum(cache.nbytes.values())


@pytest.mark.parametrize("page_size", [1, 2, 3, 61, 69, 256])
def test_pages_of_any_size_are_aligned(page_size):
    cache = CacheSpec(window="MixedFp8", index="IndexFp8", page_sizes={1: page_size, 2: page_size})
    for tensor in storages(cache.allocate(V41, max_tokens=1)):
        assert tensor.stride(0) % 16 == 0
    index = CacheSpec.for_plan(V41, page_size=page_size).allocate(V41, max_tokens=1).groups[0].index
    assert 0 <= index.data.shape[1] - page_size * 68 < 16


def test_window_ring_holds_the_rows_of_a_step_beside_the_window():
    for max_rows, max_draft, columns in (
        (1, 0, 2),
        (1, 1, 3),
        (65, 0, 3),
        (66, 0, 4),
        (4096, 3, 66),
    ):
        layout = CacheSpec().layout(V41, max_tokens=1, max_rows=max_rows, max_draft=max_draft)
        assert layout.window_columns == columns
        assert layout.window_columns * 64 >= 127 + max(max_rows, 1 + max_draft)


def test_bad_specs_and_sizes():
    for fields, message in (
        ({"main": "IndexFp4"}, r"main must be one of \['MainFp4', 'WindowFp8', 'MixedFp8'\]"),
        ({"index": "nonsense"}, r"index must be one of \['IndexFp4', 'IndexFp8'\], got nonsense"),
        ({"window": "MainFp4"}, r"window must be one of \['WindowFp8', 'MixedFp8'\], got MainFp4"),
        ({"page_sizes": {1: 0}}, r"page_sizes\[1\] must be 1 to 256, got 0"),
        ({"window_page_size": 257}, "window_page_size must be 1 to 256, got 257"),
    ):
        with pytest.raises(ValueError, match=f"flash_csa.CacheSpec: {message}"):
            CacheSpec(**fields)
    with pytest.raises(ValueError, match="page_sizes must be given for ratio 2"):
        CacheSpec(page_sizes={1: 64}).layout(V41, max_tokens=1)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        CacheSpec().layout(V41, max_tokens=0)


def held(pool: BlockPool, request: int) -> dict[int, list[int]]:
    return {r: [id for id in t[request].tolist() if id >= 0] for r, t in pool.block_tables.items()}


def test_spans_give_every_ratio_its_pages():
    layout = CacheSpec().layout(V41, max_tokens=512, max_requests=2, max_rows=512)
    pool = BlockPool(layout, span_order=[5, 2, 0, 1, 3, 4, 6, 7])
    pool.reserve(1, 0, 129)
    assert pool.block_tables[2][1].tolist() == [5, 2, -1, -1]
    assert pool.block_tables[1][1].tolist() == [10, 11, 4, 5, -1, -1, -1, -1]
    assert held(pool, 0) == {1: [], 2: []}
    pool.reserve(1, 129, 127)  # the second span holds token 255
    assert (held(pool, 1)[2], pool.free_spans) == ([5, 2], 6)
    pool.reserve(1, 256, 1)
    assert held(pool, 1)[2] == [5, 2, 0]
    pool.free(1)
    assert (held(pool, 1), pool.free_spans) == ({1: [], 2: []}, 8)
    pool.reserve(0, 0, 384)
    assert held(pool, 0)[2] == [5, 2, 0]


def test_v4_spans():
    layout = CacheSpec.for_plan(V4).layout(V4, max_tokens=2048, max_rows=2048)
    pool = BlockPool(layout, span_order=[1, 0])
    pool.reserve(0, 0, 1025)
    assert held(pool, 0) == {4: [4, 5, 6, 7, 0, 1, 2, 3], 128: [1, 0]}


def test_exhaustion_changes_nothing():
    layout = CacheSpec().layout(V41, max_tokens=512, max_requests=2, num_spans=3, max_rows=512)
    pool = BlockPool(layout)
    pool.reserve(0, 0, 256)
    before = (pool.free_spans, pool.free_window_pages, pool.window_table.clone())
    with pytest.raises(OutOfPages, match="request 1 needs 2 more spans, 1 free"):
        pool.reserve(1, 0, 129)
    assert before[:2] == (pool.free_spans, pool.free_window_pages)
    assert torch.equal(pool.window_table, before[2])
    assert held(pool, 1) == {1: [], 2: []}
    with pytest.raises(ValueError, match=r"request must be open \(\[0\]\), got 1"):
        pool.free(1)
    pool.reserve(1, 0, 128)

    scarce = CacheSpec().layout(V41, max_tokens=512, max_requests=2, max_rows=512, window_pages=5)
    pool = BlockPool(scarce)
    pool.reserve(0, 0, 256)
    with pytest.raises(OutOfPages, match="request 1 needs 2 more window pages, 1 free"):
        pool.reserve(1, 0, 128)
    assert (pool.free_spans, pool.free_window_pages) == (6, 1)
    pool.reserve(0, 256, 1)  # tokens 129 .. 256 live in pages 2, 3 and 4
    assert pool.free_window_pages == 2
    pool.reserve(1, 0, 128)


def test_double_free_and_bounds():
    pool = BlockPool(CacheSpec().layout(V41, max_tokens=100, max_requests=2))
    pool.reserve(0, 0, 1)
    pool.free(0)
    with pytest.raises(ValueError, match=r"request must be open \(\[\]\), got 0"):
        pool.free(0)
    for arguments, message in (
        ((2, 0, 1), "request must be 0 to 1, got 2"),
        ((0, 0, 2), "rows must be 0 to 1, got 2"),
        ((0, 128, 1), "start must be 0 to 127, got 128"),
        ((0, -1, 1), "start must be 0 to 127, got -1"),
    ):
        with pytest.raises(ValueError, match=f"flash_csa.BlockPool: {message}"):
            pool.reserve(*arguments)
    with pytest.raises(ValueError, match="span_order must be a permutation of 0 to 1, got"):
        BlockPool(pool.layout, span_order=[0, 0])


def test_window_pages_come_back_after_a_long_chunk():
    layout = CacheSpec().layout(V41, max_tokens=2048, max_rows=1024)
    assert layout.window_columns == 18
    pool = BlockPool(layout, window_order=range(17, -1, -1))
    pool.reserve(0, 0, 1024)
    assert pool.window_table[0].tolist() == [*range(17, 1, -1), -1, -1]
    pool.reserve(0, 1024, 1)  # live: tokens 897 .. 1024, pages 14, 15, 16
    assert (pool.window_table[0] >= 0).nonzero().flatten().tolist() == [14, 15, 16]
    assert pool.free_window_pages == 15
    tables = pool.window_table.data_ptr()
    pool.free(0)
    assert pool.free_window_pages == 18
    assert pool.window_table.data_ptr() == tables
    assert (pool.window_table == -1).all()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_no_page_has_two_owners(data):
    """Random chunks, decode steps, rollbacks and frees on a pool that is too small for all."""
    page = data.draw(st.sampled_from([1, 8, 48, 64]))
    spec = CacheSpec.for_plan(V41, page_size=page)
    layout = spec.layout(
        V41, max_tokens=1024, max_requests=3, max_rows=200, max_draft=3, num_spans=1500 // page
    )
    pool = BlockPool(layout)
    lengths: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        request = data.draw(st.integers(0, 2))
        if request in lengths and data.draw(st.integers(0, 4)) == 0:
            pool.free(request)
            del lengths[request]
        else:
            start = lengths.get(request, 0)
            rows = min(data.draw(st.integers(0, 200)), 1024 - start)
            try:
                pool.reserve(request, start, rows)
            except OutOfPages:
                continue
            rejected = data.draw(st.integers(0, min(rows, 3))) if rows <= 4 else 0
            lengths[request] = start + rows - rejected
            ring = layout.window_columns * page
            for position in range(max(0, start - 127), start + rows):
                assert pool.window_table[request, position % ring // page] >= 0
        for table, free, total in (
            *(
                (
                    pool.block_tables[r],
                    pool.free_spans * layout.pages_per_span(r),
                    layout.num_pages(r),
                )
                for r in (1, 2)
            ),
            (pool.window_table, pool.free_window_pages, layout.window_pages),
        ):
            ids = table[table >= 0].tolist()
            assert len(ids) == len(set(ids)) == total - free
        for request, length in lengths.items():
            assert len(held(pool, request)[2]) * 2 * page >= length
