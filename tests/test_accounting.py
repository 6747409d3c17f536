"""Every figure of the specification, and the tensors that are allocated to back it."""

import math
from fractions import Fraction

import pytest

from flash_csa import accounting, configs
from flash_csa.accounting import Cost
from flash_csa.cache import CacheSpec
from flash_csa.plan import LayerPlan
from models import group_of_eight

V41 = LayerPlan.from_config(configs.V41_FLASH)
V4 = LayerPlan.from_config(configs.V4_FLASH)
PRO = LayerPlan.from_config(configs.V4_PRO)
M = 1_048_576


def test_bytes_per_token_of_the_published_caches():
    assert [value for _, value in accounting.comparison()] == [
        890,
        1490,
        1650,
        1790,
        3200,
        10_324,
        Fraction(351_425, 100),
        Fraction(50_314_375, 10_000),
        48_068,
    ]
    for plan, value in ((V41, 890.0), (V4, 3514.25), (PRO, 5031.4375)):
        assert float(accounting.spec_bytes_per_token(plan, CacheSpec.for_plan(plan))) == value


@pytest.mark.case("Byte accounting")
def test_a_million_tokens():
    report = accounting.cache_bytes(CacheSpec().layout(V41, max_tokens=M), [M])
    assert report.ideal == report.allocated == 933_232_640 == 890 * 2**20
    assert sum(r.ideal for r in report.records if r.kind == "main") == 720 * M
    assert sum(r.ideal for r in report.records if r.kind == "index") == 170 * M
    assert [(r.source, r.kind, r.entries) for r in report.records] == [
        (layer, kind, M // (1 if layer == 20 else 2))
        for layer in (2, 8, 14, 20)
        for kind in ("main", "index")
    ]
    assert sum(r.bytes_per_token for r in report.records) == 890
    assert report.window_ideal == report.window_steady == report.window_allocated == 2_703_360
    assert report.tails_ideal == report.tails_allocated == 3 * 8192


@pytest.mark.case("Byte accounting")
@pytest.mark.parametrize("tokens", [1, 2, 3, 127, 128, 129, 1001])
def test_odd_token_counts_use_whole_entries(tokens):
    report = accounting.cache_bytes(CacheSpec().layout(V41, max_tokens=tokens), [tokens])
    assert report.ideal == (3 * (tokens // 2) + tokens) * (288 + 68)
    spans = -(-tokens // 128)
    assert report.allocated == spans * 128 * 890
    two = accounting.cache_bytes(
        CacheSpec().layout(V41, max_tokens=tokens, max_requests=2), [tokens] * 2
    )
    assert (two.ideal, two.allocated) == (2 * report.ideal, 2 * report.allocated)


@pytest.mark.case("Byte accounting")
@pytest.mark.parametrize("page_size", [1, 8, 61, 64, 256])
@pytest.mark.parametrize("aligned", [True, False])
def test_allocated_tensors_are_the_predicted_bytes(page_size, aligned):
    """Beyond the ideal: the open span, and 16-byte alignment of pages of odd sizes."""
    tokens = 512 * page_size if aligned else 512 * page_size - 3
    spec = CacheSpec.for_plan(V41, page_size=page_size)
    sizes = {"max_tokens": tokens, "max_requests": 2, "max_rows": 70, "max_draft": 3}
    cache = spec.allocate(V41, **sizes)
    report = accounting.cache_bytes(spec.layout(V41, **sizes), [tokens] * 2)
    allocated = cache.nbytes
    assert report.allocated == allocated["main"] + allocated["index"]
    assert report.window_allocated == allocated["window"]
    assert report.tails_allocated == allocated["tails"]
    assert report.ideal <= report.allocated
    assert report.window_ideal <= report.window_steady <= report.window_allocated

    span = 2 * page_size
    spans = 2 * math.ceil(tokens / span)
    ideal = 2 * (3 * (tokens // 2) + tokens) * 356
    padding = -68 * page_size % 16  # of an index page
    pages = (3 + 2) * spans  # a span is one page at ratio 2 and two at ratio 1
    assert report.ideal == ideal
    assert report.allocated - ideal == (spans * span * 890 - ideal) + pages * padding
    if aligned and page_size % 4 == 0:
        assert report.allocated == tokens * 2 * 890


def test_window_pages_of_decode_and_of_long_chunks():
    layout = CacheSpec().layout(V41, max_tokens=M, max_rows=4096)
    report = accounting.cache_bytes(layout, [M])
    page = 40 * 64 * 528
    assert report.window_ideal == 2 * page
    assert report.window_steady == 3 * page  # 128 tokens may touch three pages of 64
    assert report.window_allocated == 66 * page  # 127 + 4096 tokens
    odd = CacheSpec(window_page_size=63).layout(V41, max_tokens=M, max_rows=4096)
    size = 40 * odd.spec.window_page_size * 528
    assert accounting.cache_bytes(odd, [M]).window_steady == 4 * size  # 1 + 63 + 63 + 1 tokens


def test_v4_tails():
    report = accounting.cache_bytes(CacheSpec.for_plan(V4).layout(V4, max_tokens=1), [1])
    csa = 8 * 2 * (1024 + 256) * 4
    hca = 128 * 2 * 512 * 4
    assert report.tails_ideal == 21 * csa + 20 * hca
    drafts = accounting.cache_bytes(
        CacheSpec.for_plan(V4).layout(V4, max_tokens=1, max_draft=4), [1]
    )
    assert drafts.tails_ideal == report.tails_ideal
    assert drafts.tails_allocated == 21 * csa * 12 // 8 + 20 * hca * 132 // 128


def test_lists_and_tables():
    layout = CacheSpec().layout(V41, max_tokens=M)
    assert accounting.step_bytes(layout, 4) == {
        "selection": 4 * (2 * 512 + 1) * 4,
        "pool": 4 * (2048 + 1) * 4,
        "window lists": 4 * (128 + 1 + 1) * 4,
        "entry slots and n_vis": 4 * 2 * 2 * 4,
    }
    assert accounting.table_bytes(layout) == {
        "block tables": (8192 + 16384 + 2) * 4,
        "cos/sin tables": 2 * 256 * 2**20,
    }


def group_plan(ratio: int, pool_blocks: int) -> LayerPlan:
    return LayerPlan.from_config(group_of_eight(ratio, pool_blocks))


def test_comparison_counts():
    assert accounting.comparisons(group_plan(1, 512), 32_768) == (
        40_960,
        262_144,
    )
    assert accounting.comparisons(group_plan(4, 2048), M) == (
        294_912,
        2_097_152,
    )
    # V4.1: three Full layers of ratio 2 score half a million entries, layer 20 a million, four
    # Reindex layers a pool each.
    scored, flat = accounting.comparisons(V41, M)
    assert scored == 3 * M // 2 + M + 4 * 16_384
    assert flat == 18 * M // 2 + 20 * M
    assert accounting.comparisons(V4, M) == (21 * M // 4, 21 * M // 4)


def test_positions_of_a_pool():
    plan = group_plan(1, 2)
    visible = [0, 1, 15, 16, 17, 23, 24, 25]
    # Above two blocks: one whole block and the newest, which may be partly visible.
    expected = [0, 1, 15, 16, 9, 15, 16, 9]
    assert [accounting.pool_positions(plan, n) for n in visible] == expected
    reuse = plan.layers[7]
    assert accounting.attended_entries(plan, reuse, 100) == 12  # a pool narrower than k


def test_attend():
    cost = accounting.attend(
        rows=256, heads=64, main_records=256 * 512, window_records=256 * 128, derotate=False
    )
    assert cost.bytes["main codes"] + cost.bytes["main scales"] == 256 * 512 * 288
    assert cost.bytes["main scales"] == 256 * 512 * 32
    assert cost.bytes["window"] == 256 * 128 * 528
    assert cost.bytes["lists"] == 256 * (512 + 128 + 2) * 4
    assert cost.bytes["queries"] == 256 * 64 * 1024
    assert cost.bytes["outputs"] == 256 * 64 * (1024 + 4)
    assert cost.flops == 256 * 640 * 64 * 4 * 512
    assert cost.bytes["tables"] == 64 * 4  # sinks
    turned = accounting.attend(rows=256, heads=64, main_records=256 * 512, window_records=256 * 128)
    assert turned.bytes["tables"] == 64 * 4 + 256 * (64 * 4 + 4)  # angles and a position
    assert turned.flops == cost.flops + 256 * 64 * 32 * 6  # a pair: four products, two sums
    shared = accounting.attend(
        rows=2, heads=8, main_records=8, window_records=4, unique_main=5, unique_window=3
    )
    assert shared.bytes["window"] == 3 * 528
    assert shared.bytes["lists"] == (8 + 4 + 4) * 4
    assert shared.bytes["main codes"] == 5 * 256
    hca = accounting.attend(
        rows=1, heads=1, main_records=20, window_records=0, main="MixedFp8", block_table_page=8
    )
    assert hca.bytes["main codes"] + hca.bytes["main scales"] == 20 * 584
    assert hca.bytes["lists"] == (3 + 2) * 4


def test_index():
    cost = accounting.index_scores(rows=1, heads=32, entries=M)
    assert cost.bytes["index keys"] == M * 68
    assert cost.bytes["scores"] == M * 4
    assert cost.bytes["queries"] == 32 * (68 + 4)
    assert cost.flops == M * 32 * 256
    # A Reindex row reads 1.1 MB of keys.
    pool = accounting.reindex(rows=1, heads=32, entries=16_384, k=512, pool_blocks=2048)
    assert pool.bytes["index keys"] == 2048 * (512 + 32)
    assert "scores" not in pool.bytes
    chunk = accounting.index_select(
        rows=4, heads=32, entries=4000, unique_entries=1003, k=512, pool_blocks=2048
    )
    assert chunk.bytes["index keys"] == 1003 * 68
    assert chunk.bytes["outputs"] == 4 * (2 * 512 + 1 + 2048 + 1) * 4
    assert chunk.flops == 4000 * 32 * 256
    two_ops = accounting.index_scores(rows=4, heads=32, entries=4000, unique_entries=1003)
    chosen = accounting.select(rows=4, entries=4000, k=512, pool_blocks=2048)
    assert chosen.bytes["lists"] == 4 * 2 * 4  # positions and requests
    two_ops += chosen
    assert two_ops.nbytes == chunk.nbytes + 2 * 4000 * 4


def test_compress():
    cost = accounting.compress(rows=32_768, ratio=2)
    assert cost.bytes["inputs"] == 32_768 * 2 * 512 * 4
    assert cost.bytes["main codes"] + cost.bytes["main scales"] == 16_384 * 288
    assert cost.bytes["index keys"] == 16_384 * 68
    rotations = 16_384 * 2 * 32 * 6  # main record and key: 32 pairs each
    assert cost.flops == 32_768 * 2 * 512 + 16_384 * 2 * 512 * 128 + rotations
    plain = accounting.compress(rows=32_768, ratio=1, latent=True)
    assert plain.bytes["inputs"] == 32_768 * 1024
    assert plain.bytes["outputs"] == 32_768 * 1024
    overlap = accounting.compress(
        rows=8, ratio=4, overlap=True, bias=True, main="MixedFp8", index=None, tail_rows=16
    )
    assert overlap.bytes["inputs"] == 8 * 2 * 1024 * 4
    assert overlap.bytes["weights"] == 512 * 4 + 4 * 1024 * 4
    assert overlap.bytes["tails"] == 16 * 2 * 1024 * 4
    assert overlap.bytes["main codes"] == 2 * 576
    assert "index keys" not in overlap.bytes


def test_small_stages():
    rope = accounting.rope_store(rows=8192, heads=64)
    assert rope.bytes["queries"] == 8192 * 64 * 64 * 2 * 2
    assert rope.bytes["window"] == 8192 * 528
    normed = accounting.rope_store(rows=8192, heads=64, q_norm=True)
    assert normed.bytes["queries"] == 8 * rope.bytes["queries"]
    query = accounting.quantize_query(rows=3, heads=32)
    assert query.bytes["queries"] == 3 * 32 * 68
    stored = accounting.store(rows=5, record="IndexFp8")
    assert stored.nbytes == 5 * (256 + 132 + 4)
    merged = accounting.merge(parts=2, rows=3, heads=8)
    assert merged.nbytes == 3 * 8 * (2 * (2048 + 4) + 1024 + 4)


def test_costs_add_up():
    total = Cost({"a": 1, "b": 2}, 3) + Cost({"b": 4, "c": 5}, 6)
    assert (total, total.nbytes) == (Cost({"a": 1, "b": 6, "c": 5}, 9), 12)


def test_a_decode_step_at_a_million_tokens():
    costs = accounting.step_costs(V41, CacheSpec(), [M - 1], [1])
    assert set(costs) == {
        "rope_store", "attend", "compress", "quantize_query", "index_select", "reindex"
    }  # fmt: skip
    attend = costs["attend"]
    assert attend.bytes["main codes"] + attend.bytes["main scales"] == 38 * 512 * 288
    assert attend.bytes["window"] == 40 * 128 * 528
    assert attend.flops > (38 * 512 + 40 * 128) * 64 * 4 * 512
    assert costs["index_select"].bytes["index keys"] == (3 * M // 2 + M) * 68
    assert costs["reindex"].bytes["index keys"] == 4 * 16_384 * 68
    written = costs["compress"].bytes
    assert written["main codes"] + written["main scales"] + written["index keys"] == 4 * 356
    assert written["tails"] == 3 * 2 * (2 * 512 * 4)  # the open row read, the new one written


def test_a_chunk_is_the_sum_of_its_rows():
    """FLOPs, lists and records do not depend on how rows arrive; shared reads do."""
    spec = CacheSpec.for_plan(V4)
    chunk = accounting.step_costs(V4, spec, [300], [9])
    rows = [accounting.step_costs(V4, spec, [300 + i], [1]) for i in range(9)]
    for stage, cost in chunk.items():
        assert cost.flops == sum(row[stage].flops for row in rows)
        assert cost.nbytes <= sum(row[stage].nbytes for row in rows)
    assert chunk["compress_index"].bytes["index keys"] == 21 * 2 * 68  # entries 75 and 76 close
    csa, hca = ({layer.ratio: layer for layer in V4.layers}[ratio] for ratio in (4, 128))
    writes = [accounting.layer_costs(V4, spec, layer, [120], [9]) for layer in (csa, hca)]
    assert [set(costs) - {"rope_store", "attend"} for costs in writes] == [
        {"compress", "compress_index", "quantize_query", "index_select"},
        {"compress"},
    ]
    assert not any("index keys" in costs["compress"].bytes for costs in writes)
    batch = accounting.step_costs(V4, spec, [300, 300], [9, 9])
    assert batch["attend"].bytes["window"] == 2 * chunk["attend"].bytes["window"]
    idle = accounting.step_costs(V4, spec, [300, 5], [9, 0])
    assert idle == chunk


def test_heads_of_a_shard_divide_queries_not_records():
    full = accounting.step_costs(V41, CacheSpec(), [5000], [1])["attend"]
    plan = LayerPlan.from_config(configs.V41_FLASH, heads=8)
    shard = accounting.step_costs(plan, CacheSpec(), [5000], [1])["attend"]
    assert shard.bytes["queries"] * 8 == full.bytes["queries"]
    assert shard.bytes["main codes"] == full.bytes["main codes"]
