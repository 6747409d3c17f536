"""The reference module's selection, attention and pipeline: golden tensors and degenerations."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import golden
from flash_csa.reference import attend, compress, group, index, ops, pages, quant, select, step
from reference_data import (
    KV_SOURCE,
    RATIOS,
    STACKS,
    generator,
    layer_rows,
    meta,
    randn,
    same_bits,
    table,
    tensor,
    v4_like,
)


def chosen_sets(selection: torch.Tensor) -> list[set[int]]:
    return [set(row.tolist()) - {-1} for row in selection]


@pytest.mark.parametrize("name", STACKS)
def test_select_golden(name):
    archive = golden.load(name)
    limits = meta(archive)
    rows, n_vis = layer_rows(archive, 3)
    pool = select.build_pool(tensor(archive, "L3.index_scores"), n_vis, limits["pool_blocks"])
    candidates = tensor(archive, "L3.candidates")[rows]
    for blocks, visible, expected in zip(pool.blocks, n_vis.tolist(), candidates, strict=True):
        assert torch.equal(select.pool_positions(blocks, visible), expected.nonzero().flatten())
    for layer in (1, 3, 4):
        _, n_vis = layer_rows(archive, layer)
        scores = tensor(archive, f"L{layer}.index_scores")
        selection = select.select(scores, n_vis, limits["topk"], pool if layer == 4 else None)
        assert (
            (selection.positions.diff(dim=1) > 0).logical_or(selection.positions[:, 1:] < 0).all()
        )
        expected = chosen_sets(tensor(archive, f"L{layer}.topk")[rows])
        found = chosen_sets(selection.positions)
        assert [len(s) for s in found] == [len(s) for s in expected]
        missing = [
            len(e - f) for e, f in zip(expected, found, strict=True)
        ]  # golden ranks BF16 scores
        assert max(missing) <= 1
        assert sum(missing) <= 0.01 * sum(map(len, expected))


def test_select_real_sizes():
    archive = golden.load("pool_real")
    n_vis = tensor(archive, "visible")
    pool = select.build_pool(tensor(archive, "full_scores"), n_vis, 2048)
    candidates = np.unpackbits(archive["candidates"], axis=1)
    for blocks, visible, expected in zip(pool.blocks, n_vis.tolist(), candidates, strict=True):
        assert select.pool_positions(blocks, visible).tolist() == np.flatnonzero(expected).tolist()
    for result, scores, within in (
        ("full_topk", "full_scores", None),
        ("reindex_topk", "reindex_scores", pool),
        ("reindex_topk_without_pool", "reindex_scores", None),
    ):
        selection = select.select(tensor(archive, scores), n_vis, 512, within)
        assert torch.equal(selection.positions, tensor(archive, result))
        assert torch.equal(selection.lengths, n_vis.clamp(max=512))
    k = tensor(archive, "k_dequant").float()
    for name in ("full", "reindex"):
        q, weights = (
            tensor(archive, f"{name}_q_dequant").float(),
            tensor(archive, f"{name}_weights"),
        )
        scores, expected = index.index_scores(q, k, weights), tensor(archive, f"{name}_scores")
        expected = torch.where(expected.isinf(), scores, expected)  # -inf where not visible
        assert ((scores - expected).abs() <= 1e-6 * expected.abs().amax(-1, keepdim=True)).all()


def test_select_order_is_total():
    scores = torch.tensor([[0.0, -0.0, 1.0, torch.nan, -torch.inf, torch.inf, -0.0, 9.0]])
    n_vis = torch.tensor([7])
    for k, expected in ((1, [5]), (2, [2, 5]), (3, [0, 2, 5]), (4, [0, 1, 2, 5])):
        assert select.select(scores, n_vis, k).positions[0].tolist() == expected
    selection = select.select(scores, n_vis, 8)
    assert selection.positions[0].tolist() == [0, 1, 2, 4, 5, 6, -1, -1]  # never the NaN
    assert selection.lengths.tolist() == [6]
    assert selection.scores[0, :2].tolist() == [0.0, -0.0]
    assert select.select(scores, torch.tensor([0]), 3).positions.tolist() == [[-1] * 3]


@pytest.mark.parametrize("visible", [0, 1, 7, 8, 9, 31, 32, 33, 70])
def test_select_pool_holds_the_newest_block(visible):
    scores = torch.full((1, 80), 100.0)
    scores[0, visible - 1 if visible else 0] = 0
    n_vis = torch.tensor([visible])
    pool = select.build_pool(scores, n_vis, 4)
    blocks = -(-visible // 8)
    assert int(pool.counts) == min(4, blocks)
    expected = list(range(blocks)) if blocks <= 4 else [0, 1, 2, blocks - 1]
    assert pool.blocks[0].tolist() == expected + [-1] * (4 - len(expected))
    inside = select.select(scores, n_vis, 16, pool)
    assert int(inside.lengths) == min(16, len(select.pool_positions(pool.blocks[0], visible)))
    if blocks <= 4:  # the pool is everything
        assert torch.equal(inside.positions, select.select(scores, n_vis, 16).positions)


def test_select_normalize_pool():
    foreign = torch.tensor([[5, 2, 2, -1, 9, 5], [1, 1, 1, 1, 1, 1]])
    pool = select.normalize_pool(foreign, torch.tensor([41, 8]), 6)
    assert pool.blocks.tolist() == [[2, 5, -1, -1, -1, -1], [-1] * 6]
    assert pool.counts.tolist() == [2, 0]
    with pytest.raises(ValueError, match="6 blocks exceed 5"):
        select.normalize_pool(foreign, torch.tensor([41, 8]), 5)


@pytest.mark.parametrize("shards", [1, 3])
def test_select_merges_shards(shards):
    scores = randn(4, 192, seed=7, dtype=torch.float32).round(decimals=1)  # many ties
    scores[:, 5] = torch.nan
    n_vis = torch.tensor([192, 130, 20, 0])
    parts = []
    for shard in range(shards):
        mine = (torch.arange(192) // 8 % shards == shard)[None]
        own = torch.where(mine, scores, torch.nan)
        parts.append((select.select(own, n_vis, 16), select.build_pool(own, n_vis, 6)))
    positions, found = (
        torch.stack([getattr(s, f) for s, _ in parts]) for f in ("positions", "scores")
    )
    merged, whole = select.merge_selections(positions, found, 16), select.select(scores, n_vis, 16)
    assert torch.equal(merged.positions, whole.positions)
    assert torch.equal(merged.lengths, whole.lengths)
    blocks, found = (torch.stack([getattr(p, f) for _, p in parts]) for f in ("blocks", "scores"))
    merged, whole = select.merge_pools(blocks, found, n_vis, 6), select.build_pool(scores, n_vis, 6)
    assert torch.equal(merged.blocks, whole.blocks)


# ---- attend


def golden_lists(archive: dict, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = tensor(archive, "rows").long()
    window = tensor(archive, f"L{layer}.window_dequant").float()
    lists, _ = step.window_lists(rows, meta(archive)["window"])
    if KV_SOURCE[layer] is None:
        return window, lists.long()
    main = tensor(archive, f"L{KV_SOURCE[layer]}.main_dequant").float()
    return attend.join(window, lists, main, tensor(archive, f"L{layer}.topk")[rows])


@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("name", STACKS)
def test_attend_golden(name, layer):
    archive = golden.load(name)
    q, sink = tensor(archive, f"L{layer}.q"), tensor(archive, f"L{layer}.sink")
    expected, expected_lse = (tensor(archive, f"L{layer}.attend_{x}") for x in ("out_fp32", "lse"))
    records, lists = golden_lists(archive, layer)
    out, lse = attend.attend(q, records, lists, sink=sink)
    fp32, lse_bound = attend.error_bounds(q, records, lists, sink=sink, bf16=False)
    assert ((out - expected).abs() <= fp32).all()
    assert ((lse - expected_lse).abs() <= lse_bound).all()
    exact_p, lse_steps = attend.attend_in_steps(q, records, lists, sink=sink, p_dtype=torch.float32)
    assert ((out - exact_p).abs() <= fp32).all()
    assert ((lse - lse_steps).abs() <= lse_bound).all()
    rounded_p, _ = attend.attend_in_steps(q, records, lists, sink=sink)
    rounded_p = rounded_p.bfloat16().double()
    bf16, _ = attend.error_bounds(q, records, lists, sink=sink)
    assert ((out - rounded_p).abs() <= bf16).all()
    assert (1 - torch.cosine_similarity(out, rounded_p, dim=-1) <= 5e-6).all()
    turned = attend.derotated_output(expected, tensor(archive, "rows"), table(300, RATIOS[layer]))
    assert same_bits(turned, tensor(archive, f"L{layer}.attend_out_derotated"))


@pytest.mark.parametrize("layer", range(3))
def test_attend_v4_golden(layer):
    archive = golden.load("v4_small")
    rows, ratio = tensor(archive, "rows").long(), [0, 4, 128][layer]
    keys = tensor(archive, f"L{layer}.keys")
    window, main = keys[:261], keys[261:]
    lists, _ = step.window_lists(rows)
    if ratio:
        n_vis = step.visible_entries(rows, ratio)
        selected = attend.contiguous_lists(n_vis, len(main))
        if ratio == 4:
            names = ("q_rotated", "k_rotated", "weights")
            scores = index.index_scores(*(tensor(archive, f"L1.index_{name}") for name in names))
            expected = tensor(archive, "L1.index_scores_unmasked")
            torch.testing.assert_close(scores, expected, rtol=0, atol=3e-6)
            selected = select.select(expected, n_vis, 24).positions
            assert chosen_sets(selected) == chosen_sets(tensor(archive, "L1.topk"))
        keys, lists = attend.join(window, lists, main, selected)
    visible = tensor(archive, f"L{layer}.visible")
    assert chosen_sets(lists) == [set(row.nonzero().flatten().tolist()) for row in visible]
    q, sink = tensor(archive, f"L{layer}.q"), tensor(archive, f"L{layer}.sink")
    out, _ = attend.attend(q, keys, lists.long(), sink=sink)
    expected = tensor(archive, f"L{layer}.attend_out").double()
    torch.testing.assert_close(out, expected, rtol=0, atol=3e-6)


def test_attend_sink_holes_and_empty_rows():
    q, records = randn(2, 3, 512), randn(70, 512, seed=1, dtype=torch.float32)
    lists = torch.full((2, 200), -1)
    lists[0, torch.randperm(200, generator=generator(3))[:70]] = torch.arange(70)
    sink = torch.tensor([0.0, torch.inf, -torch.inf])
    for run in (attend.attend, attend.attend_in_steps):
        out, lse = run(q, records, lists, sink=sink)
        plain, plain_lse = run(q, records, lists)
        assert torch.equal(lse, plain_lse)
        assert (out[1] == 0).all() and (lse[1] == torch.inf).all()
        assert (out[0, 1] == 0).all() and torch.equal(out[0, 2], plain[0, 2])
        torch.testing.assert_close(out[0, 0], plain[0, 0] * torch.sigmoid(lse[0, 0]))
    compact = attend.attend(q[:1], records, lists[:1, :][lists[:1] >= 0][None])
    torch.testing.assert_close(compact[0], attend.attend(q, records, lists)[0][:1])


def test_attend_merge():
    outs = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 1, 1, 4)
    lses = torch.tensor([2.0, 8.0]).log().view(2, 1, 1)
    out, lse = attend.merge(outs, lses)
    assert out.flatten().tolist() == pytest.approx([0.8] * 4)
    assert float(lse) == pytest.approx(np.log(10))
    q, records = randn(3, 2, 512), randn(50, 512, seed=1, dtype=torch.float32)
    lists = torch.arange(50).repeat(3, 1)
    lists[1, 20:] = -1
    lists[2] = -1
    sink = torch.tensor([0.5, -1.0])
    whole, whole_lse = attend.attend(q, records, lists, sink=sink)
    parts = [attend.attend(q, records, part) for part in lists.split(20, dim=1)]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    outs[-1, 1], lses[-1, 1] = torch.nan, -torch.inf  # an empty part may hold anything
    out, lse = attend.merge(outs, lses, sink)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)


# ---- group


KEY_WEIGHT = randn(128, 512, seed=3)


def csa2_inputs(tokens: int, ratio: int, seed: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    kv, gate = (randn(tokens, 512, seed=seed + i, dtype=torch.float32) for i in (1, 2))
    return (kv.bfloat16(), None) if ratio == 1 else (kv, gate)


def csa2_group(tokens: int, ratio: int, k: int, seed: int = 0, window: int = 128) -> group.Group:
    stage = compress.Compressor(ratio, torch.ones(512), 1e-20)
    model = group.Model(table(), window)
    entries = compress.csa2_entries(
        stage, *csa2_inputs(tokens, ratio, seed), model.cos_sin, KEY_WEIGHT, torch.ones(128)
    )
    return group.Group(model, entries, ratio, k)


def layer_of(tokens: int, seed: int) -> group.Layer:
    return group.Layer(
        q=randn(tokens, 2, 512, seed=seed),
        window_kv=randn(tokens, 512, seed=seed + 1),
        sink=torch.tensor([0.3, -0.7]),
        index_q=randn(tokens, 4, 128, seed=seed + 2),
        index_weights=randn(tokens, 4, seed=seed + 3),
    )


def part_of(layer: group.Layer, begin: int, end: int, first: int = 0) -> group.Layer:
    names = ("q", "window_kv", "index_q", "index_weights")
    return replace(layer, first=first, **{name: getattr(layer, name)[begin:end] for name in names})


@pytest.mark.parametrize("ratio", [1, 2])
def test_group_modes(ratio):
    tokens, k = 90, 6
    shared = csa2_group(tokens, ratio, k)
    full = shared.full(layer_of(tokens, 10), pool_blocks=3)
    above = layer_of(tokens, 20)
    reindexed = shared.reindex(above, full.pool)
    n_vis = step.visible_entries(torch.arange(tokens), ratio)
    for t in range(tokens):
        allowed = set(select.pool_positions(full.pool.blocks[t], int(n_vis[t])).tolist())
        assert chosen_sets(reindexed.selection.positions[t : t + 1])[0] <= allowed
        assert int(reindexed.selection.lengths[t]) == min(k, len(allowed))
    reused = shared.reuse(above, reindexed.selection)
    assert same_bits(reused.out, reindexed.out)
    everything = shared.full(above, pool_blocks=-(-tokens // 8)).pool
    flat, pooled = shared.full(above), shared.reindex(above, everything)
    assert torch.equal(flat.selection.positions, pooled.selection.positions)
    assert same_bits(flat.out, pooled.out)


def test_group_is_causal_and_dense_when_k_covers_all():
    tokens, cut = 60, 41
    shared = csa2_group(tokens, 2, 64)
    layer = layer_of(tokens, 10)
    out = shared.full(layer)
    short = csa2_group(tokens, 2, 64)
    short.main, short.keys = short.main[: cut // 2], short.keys[: cut // 2]
    assert same_bits(short.full(part_of(layer, 0, cut)).out, out.out[:cut])
    n_vis = step.visible_entries(layer.positions, 2)
    everything = attend.contiguous_lists(n_vis, len(shared.main))
    dense = group.attend_layer(layer, shared.model, shared.main, everything)
    assert same_bits(dense.out, out.out)


def test_group_bounded_replay_truncates_the_window():
    tokens, first = 260, 200
    shared = csa2_group(tokens, 2, 8)
    layer = layer_of(tokens, 10)
    replayed = shared.full(part_of(layer, first, tokens, first))
    whole = shared.full(layer)
    assert torch.equal(replayed.selection.positions, whole.selection.positions[first:])
    assert not same_bits(replayed.out, whole.out[first:])
    lists, lengths = step.window_lists(torch.tensor([first, first + 5]), 128, first)
    assert lengths.tolist() == [1, 6] and lists[1, :6].tolist() == list(range(first, first + 6))


def test_group_v4_layers():
    tokens = 140
    model = group.Model(table(), main_record="MixedFp8", window_record="MixedFp8",
                        q_norm_eps=1e-6, hadamard=True)  # fmt: skip
    stage, kv, gate = v4_like(4, tokens)
    entries = compress.csa2_entries(stage, kv, gate, model.cos_sin)
    narrow = compress.Compressor(4, torch.ones(128), 1e-6, stage.bias[:, :256], True)
    keys = compress.v4_index_keys(narrow, kv[:, :256], gate[:, :256], model.cos_sin)
    shared = group.Group(model, entries._replace(keys=keys), 4, 40)
    layer = layer_of(tokens, 10)
    out = shared.full(layer)
    assert out.selection.lengths.tolist() == [(t + 1) // 4 for t in range(tokens)]
    assert same_bits(group.hca_layer(layer, model, entries, 4).out, out.out)  # k covers all
    scaled = shared.full(replace(layer, q=layer.q * 4))  # the norm takes the scale of q away
    torch.testing.assert_close(scaled.out, out.out, rtol=0, atol=0.02)
    window = group.window_layer(layer, model)
    assert torch.equal(window.out[:3], out.out[:3])  # no entry before the first group closes


# ---- ops


def request_tables(requests: int, pages_each: int, seed: int) -> torch.Tensor:
    order = torch.randperm(requests * pages_each, generator=generator(seed))
    return order.view(requests, pages_each).int()


def poisoned_pages(record: str, tables: torch.Tensor, page_size: int) -> SimpleNamespace:
    data = torch.full_like(pages.new_pages(tables.numel(), record, page_size), 0xFF)
    return SimpleNamespace(data=data, record=record, page_size=page_size)


def batch_of(starts: list[int], counts: list[int], padding: int) -> SimpleNamespace:
    """Rows of each request at consecutive positions, then `padding` rows of no request."""
    positions, request, bounds = [], [], [0]
    for r, (start, count) in enumerate(zip(starts, counts, strict=True)):
        positions += [*range(start, start + count)] + [-1] * padding
        request += [r] * count + [-1] * padding
        bounds.append(len(positions))
    as_int = {"dtype": torch.int32}
    return SimpleNamespace(
        positions=torch.tensor(positions, **as_int),
        row_request=torch.tensor(request, **as_int),
        cu_tokens=torch.tensor(bounds, **as_int),
        start=torch.tensor(starts, **as_int),
        tail_slot=torch.arange(len(starts) - 1, -1, -1, **as_int),
    )


@pytest.mark.parametrize("ratio", [1, 2])
def test_ops_in_steps_equal_the_group_on_whole_sequences(ratio):
    """Paged, cut into steps, batched with padded rows: the bits of one call per sequence."""
    lengths, chunk, page, k, pool_blocks = [45, 3, 29], 7, 4, 5, 2
    inputs, layers, full, reindexed = [], [], [], []
    for request, tokens in enumerate(lengths):
        seed = 100 * request
        inputs.append(csa2_inputs(tokens, ratio, seed))
        layers.append(layer_of(tokens, seed + 10))
        shared = csa2_group(tokens, ratio, k, seed, window=12)
        full.append(shared.full(layers[-1], pool_blocks))
        reindexed.append(shared.reindex(layers[-1], full[-1].pool))

    block_table, window_table = request_tables(3, 12, seed=1), request_tables(3, 5, seed=2)
    main, keys = (poisoned_pages(name, block_table, page) for name in ("MainFp4", "IndexFp4"))
    window = poisoned_pages("WindowFp8", window_table, page)  # a ring of 20 positions
    tail = SimpleNamespace(rows=torch.full((3, 2, 9, 512), torch.nan))
    cos_sin, where_read = table(), {"ratio": ratio, "exact": False}
    for start in range(0, max(lengths), chunk):
        counts = [max(min(n - start, chunk), 0) for n in lengths]
        batch = batch_of([min(start, n) for n in lengths], counts, padding=2)
        real = batch.row_request >= 0

        def rows(sources: list[torch.Tensor], batch=batch, real=real) -> torch.Tensor:
            out = torch.full((len(real), *sources[0].shape[1:]), torch.nan).to(sources[0].dtype)
            out[real] = torch.stack(
                [
                    sources[r][p]
                    for r, p in zip(batch.row_request[real], batch.positions[real], strict=True)
                ]
            )
            return out

        slots = ops.step_slots(
            batch,
            [block_table],
            window_table,
            ratios=[ratio],
            page_sizes=[page],
            window_page_size=page,
            window=12,
        )
        ops.compress(
            rows([kv for kv, _ in inputs]),
            batch,
            slots.entry_slots[0],
            ratio=ratio,
            gate=None if ratio == 1 else rows([gate for _, gate in inputs]),
            norm_weight=torch.ones(512),
            eps=1e-20,
            cos_sin=cos_sin,
            tail=tail if ratio > 1 else None,
            main=main,
            index=keys,
            key_weight=KEY_WEIGHT,
            key_norm_weight=torch.ones(128),
        )
        q = rows([layer.q for layer in layers])
        window_kv = rows([layer.window_kv for layer in layers])
        ops.rope_store(q, window_kv, window, slots.window_store, batch.positions, cos_sin)
        query = ops.quantize_query(
            rows([layer.index_q for layer in layers]), batch.positions, cos_sin
        )
        assert not query.codes[~real].any()
        weights = rows([layer.index_weights for layer in layers])
        asked = (query, keys, weights, batch, block_table, k)
        selection, pool = ops.index_select(*asked, pool_blocks=pool_blocks, **where_read)
        inside, _ = ops.index_select(*asked, pool=pool, **where_read)
        for chosen, expected in ((selection, full), (inside, reindexed)):
            out, lse = ops.attend(
                q,
                main=main,
                selection=chosen,
                window_pages=window,
                window=slots.lists,
                sink=layers[0].sink,
                derotate=(batch.positions, cos_sin),
            )
            for found, field in ((out, "out"), (lse, "lse")):
                assert torch.equal(found[real], rows([getattr(e, field) for e in expected])[real])
            positions = rows([e.selection.positions for e in expected])[real]
            assert torch.equal(chosen.positions[real], positions)
            assert (chosen.slots[~real] == -1).all() and (chosen.lengths[~real] == 0).all()
            assert (out[~real] == 0).all() and (lse[~real] == torch.inf).all()
        assert torch.equal(pool.blocks[real], rows([f.pool.blocks for f in full])[real])


def test_ops_holes_are_never_selected():
    block_table = torch.tensor([[2, -1, 0]], dtype=torch.int32)
    batch = batch_of([11], [1], padding=0)
    keys = poisoned_pages("IndexFp4", torch.zeros(3), 4)
    slots = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3])
    ops.store(randn(8, 128), keys, slots)
    query = ops.quantize_query(randn(1, 8, 128, seed=1), batch.positions, table())
    scores = {}
    for exact in (False, True):
        scores[exact] = ops.index_scores(
            query, keys, torch.ones(1, 8), batch, block_table, ratio=1, exact=exact
        )
        assert scores[exact].isnan().tolist() == [[False] * 4 + [True] * 4 + [False] * 4]
    torch.testing.assert_close(scores[True], scores[False], equal_nan=True)
    selection, pool = ops.select(
        scores[True], batch, 12, block_table=block_table, ratio=1, page_size=4, pool_blocks=2
    )
    assert selection.positions[0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11] + [-1] * 4
    assert selection.slots[0, :8].tolist() == slots.tolist()
    assert pool.blocks.tolist() == [[0, 1]]


def test_ops_contiguous_equals_a_selection_of_everything():
    block_table = request_tables(2, 3, seed=4)
    main = poisoned_pages("MixedFp8", block_table, 4)
    slots = (block_table[:, :, None] * 4 + torch.arange(4)).flatten(1).int()
    ops.store(randn(24, 512), main, slots.flatten())
    q, request = randn(3, 2, 512, seed=1), torch.tensor([1, 0, 1])
    n_vis = torch.tensor([12, 5, 0], dtype=torch.int32)
    contiguous = ops.attend(q, main=main, contiguous=(block_table, request, n_vis))
    selection = SimpleNamespace(slots=slots[request], lengths=n_vis)
    for a, b in zip(contiguous, ops.attend(q, main=main, selection=selection), strict=True):
        assert torch.equal(a, b)
    assert (contiguous[1][2] == torch.inf).all()


def test_ops_bounded_replay_keeps_stored_entries():
    batch = batch_of([6], [6], padding=0)
    first = torch.tensor([[5]], dtype=torch.int32)
    slots = ops.step_slots(
        batch,
        [torch.tensor([[1, 0]])],
        torch.tensor([[0, 1, 2]]),
        ratios=[2],
        page_sizes=[4],
        window_page_size=4,
        window=8,
        window_first=torch.tensor([6]),
        entry_first=first,
    )
    assert slots.entry_slots.tolist() == [[-1, -1, -1, -1, -1, 1]]  # entry 5, page 0, offset 1
    assert slots.n_vis.tolist() == [[3, 4, 4, 5, 5, 6]]
    assert slots.lists.lengths.tolist() == [1, 2, 3, 4, 5, 6]
    assert slots.lists.slots[5].tolist() == [6, 7, 8, 9, 10, 11, -1, -1]
    main = poisoned_pages("MainFp4", torch.zeros(2), 4)
    tail = SimpleNamespace(rows=torch.full((1, 2, 4, 512), -5.0))
    kv, gate = csa2_inputs(6, 2, seed=1)
    ops.compress(
        kv,
        batch,
        slots.entry_slots[0],
        ratio=2,
        gate=gate,
        norm_weight=torch.ones(512),
        eps=1e-20,
        cos_sin=table(),
        tail=tail,
        entry_first=first[0],
        main=main,
    )
    written = (main.data != 0xFF).any(-1)
    assert written.tolist() == [True, False]
    assert (tail.rows[0, :, :2] == -5).all()  # rows of positions 8 and 9 are not kept
    assert torch.equal(tail.rows[0, 0, 2:], kv[4:])


def test_ops_v4_index_compressor():
    stage, kv, gate = v4_like(4, 19)
    kv, gate, bias = (x[:, :256] for x in (kv, gate, stage.bias))
    narrow = compress.Compressor(4, torch.ones(128), 1e-6, bias, overlap=True)
    expected = quant.quantize_dequantize(
        compress.v4_index_keys(narrow, kv, gate, table()), "IndexFp4"
    )
    keys = poisoned_pages("IndexFp4", torch.zeros(2), 4)
    tail = SimpleNamespace(rows=torch.full((1, 2, 11, 256), torch.nan))
    for start, end in ((0, 6), (6, 7), (7, 19)):
        positions = torch.arange(start, end)
        ops.compress(
            kv[start:end],
            batch_of([start], [end - start], padding=0),
            torch.where(positions % 4 == 3, positions // 4, -1),
            ratio=4,
            gate=gate[start:end],
            bias=bias,
            norm_weight=torch.ones(128),
            eps=1e-6,
            cos_sin=table(),
            tail=tail,
            index=keys,
            rotate=True,
        )
    assert torch.equal(ops.load(keys, torch.arange(4)), expected)
