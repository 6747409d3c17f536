"""The reference module's formats, compressor and scores: golden tensors and hand-made bytes."""

from dataclasses import fields
from fractions import Fraction

import pytest
import torch

import golden
from flash_csa.records import RECORDS
from flash_csa.reference import compress, index, layout, pages, quant, rope
from reference_data import (
    COMPRESSED,
    KV_SOURCE,
    RATIOS,
    STACKS,
    WINDOW_ONLY,
    assert_ulp,
    generator,
    meta,
    randn,
    same_bits,
    table,
    tensor,
    v4_like,
)


@pytest.mark.parametrize(
    ("record", "name"), [("MainFp4", "main"), ("IndexFp4", "index"), ("WindowFp8", "window")]
)
def test_quant_golden(record, name):
    archive = golden.load("quant")
    values = quant.quantize_dequantize(tensor(archive, f"{name}_in"), record)
    assert torch.equal(values, values.bfloat16().float())  # exact in BF16
    assert same_bits(values.bfloat16(), tensor(archive, f"{name}_dequant"))


def test_e2m1_rounds_ties_to_even():
    ties = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}
    x = torch.tensor(list(ties))
    codes = torch.tensor(list(ties.values()), dtype=torch.uint8)
    assert torch.equal(quant.encode_e2m1(x), codes)
    assert torch.equal(quant.encode_e2m1(-x), codes + 8)  # zero keeps its sign
    above, below = (torch.nextafter(x, torch.tensor(to)) for to in (torch.inf, 0.0))
    assert quant.encode_e2m1(above).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert quant.encode_e2m1(below).tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_e4m3_is_the_type_of_pytorch():
    codes = torch.arange(256, dtype=torch.uint8)
    values = quant.decode_e4m3(codes)
    assert torch.equal(
        values.nan_to_num(1e9), codes.view(torch.float8_e4m3fn).float().nan_to_num(1e9)
    )
    every_bf16 = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()
    middles = (quant.E4M3[1:] + quant.E4M3[:-1]) / 2
    near = [torch.nextafter(middles, torch.tensor(to)) for to in (-torch.inf, torch.inf)]
    x = torch.cat([every_bf16[every_bf16.isfinite()], middles, -middles, *near])
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(quant.encode_e4m3(x), expected)


def test_ue8m0_is_the_power_of_two_above():
    powers = torch.tensor([2.0**e for e in range(-126, 127)])
    assert torch.equal(quant.encode_ue8m0(powers), torch.arange(1, 254, dtype=torch.uint8))
    above = torch.nextafter(powers, torch.tensor(torch.inf))
    assert torch.equal(quant.encode_ue8m0(above), torch.arange(2, 255, dtype=torch.uint8))
    assert torch.equal(quant.decode_ue8m0(quant.encode_ue8m0(powers)), powers)
    smallest, nan = quant.decode_ue8m0(torch.tensor([0, 255], dtype=torch.uint8)).tolist()
    assert smallest == 2.0**-127 and nan != nan


def main_group(values: list[float]) -> tuple[list[int], int]:
    """Code bytes and scale byte of one 16-channel group."""
    x = torch.zeros(512)
    x[: len(values)] = torch.tensor(values)
    assert torch.equal(x, x.bfloat16().float())
    rows = quant.quantize(x.bfloat16(), "MainFp4")
    return rows.data[:8].tolist(), int(rows.scales[0])


def test_main_ties_at_every_scale_need_a_division():
    steps = [6, 0.25, -0.25, 0.75, -0.75, 1.25, -1.25, 1.75, -1.75, 2.5, -2.5, 3.5, -3.5, 5, -5, 0]
    scales = quant.E4M3[1:]
    x = (scales[:, None] * torch.tensor(steps)).bfloat16()
    rows = quant.quantize(x.repeat(1, 32), "MainFp4")
    assert torch.equal(rows.scales[:, 0], torch.arange(1, 127, dtype=torch.uint8))
    expected = torch.tensor([0x07, 0x28, 0x2A, 0x4A, 0x4C, 0x6C, 0x6E, 0x0E], dtype=torch.uint8)
    assert (rows.data[:, :8] == expected).all()
    by_reciprocal = quant.encode_e2m1(x.float() * (1 / scales)[:, None])
    flips = by_reciprocal != quant.unpack_nibbles(rows.data[:, :8])
    assert int((flips & (x > 0)).sum()) == 42


def test_main_nibble_order_and_scale_below_amax():
    grid = [0.5, 1, 1.5, 2, 3, 4, 6, 0.0]
    codes, scale = main_group([*grid, *(-v for v in grid)])
    assert scale == 0x38
    assert codes == [0x21, 0x43, 0x65, 0x07, 0xA9, 0xCB, 0xED, 0x8F]
    assert main_group([6.375]) == ([7] + [0] * 7, 0x38)
    assert main_group([0.0174560546875]) == ([7] + [0] * 7, 0x01)


def test_main_clamps_where_the_scale_rounds_down():
    amax = torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16)
    amax = amax[amax.float() <= 3225]
    assert len(amax) == 17738
    x = torch.zeros(len(amax), 512).bfloat16()
    x[:, 5] = amax
    rows = quant.quantize(x, "MainFp4")
    scale = quant.decode_e4m3(rows.scales[:, 0])
    over = amax.float() / scale > 6
    assert int(over[amax.float() <= 2688].sum()) <= int(over.sum()) == 1168
    assert (rows.data[over, 2] == 0x70).all()


@pytest.mark.parametrize(
    ("value", "largest"),
    [(0.0, 0), (-0.0, 0), (2.0**-133, 0), (4.5 * 2**-9, 0.0078125), (5.5 * 2**-9, 0.01171875)],
)
def test_main_tiny_groups_have_the_smallest_scale(value, largest):
    codes, scale = main_group([value])
    assert scale == 1
    assert quant.decode_e2m1(torch.tensor(codes[0] & 15)) * 2.0**-9 == largest


@pytest.mark.parametrize("name", layout.RECORDS)
def test_quant_edges(name):
    record = layout.RECORDS[name]
    floor = {"MainFp4": 0x01, "WindowFp8": 127 - 22, "IndexFp4": 1, "MixedFp8": 127 - 22}
    zeros = quant.quantize(torch.zeros(record.dims), name)
    assert not zeros.data.any()
    if name in floor:
        assert (zeros.scales[: record.num_groups] == floor[name]).all()
    never_written = (torch.zeros_like(part) for part in zeros)
    assert torch.equal(quant.dequantize(*never_written, name), torch.zeros(record.dims))
    x = randn(2, record.dims)
    clean = quant.quantize_dequantize(x, name)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x[0, record.group // 2] = bad
        rows = quant.quantize(x, name)
        codes = rows.data[0, : record.group // (2 if record.element == "E2M1" else 1)]
        assert not codes.any()
        values = quant.dequantize(*rows, name)
        assert values[0, : record.group].isnan().all()
        assert torch.equal(values[0, record.group :], clean[0, record.group :])
        assert torch.equal(values[1], clean[1])


def test_quant_mixed_and_fp32_scales():
    x = randn(7, 512)
    rows = quant.quantize(x, "MixedFp8")
    assert same_bits(
        quant.dequantize(*rows, "MixedFp8")[:, 448:].bfloat16(), x[:, 448:].contiguous()
    )
    assert (rows.scales[:, 7] == 0).all()
    rows = quant.quantize(x[:, :128], "IndexFp8")
    scale = x[:, :128].float().abs().amax(-1) / 448
    assert torch.equal(rows.scales.view(torch.float32)[:, 0], scale)


# ---- pages


def test_layout_is_that_of_the_library():
    sizes = {name: record.bytes for name, record in layout.RECORDS.items()}
    expected = {"MainFp4": 288, "WindowFp8": 528, "IndexFp4": 68, "MixedFp8": 584, "IndexFp8": 132}
    assert sizes == expected
    for name, record in layout.RECORDS.items():
        for stated in fields(RECORDS[name]):
            if stated.name not in ("id", "name"):
                assert getattr(record, stated.name) == getattr(RECORDS[name], stated.name)
        assert [record.payload(n) for n in (1, 64)] == [RECORDS[name].payload(n) for n in (1, 64)]
    assert layout.RECORDS["MixedFp8"].payload(64) == 65 * 576


@pytest.mark.parametrize("page_size", [1, 7, 64, 256])
@pytest.mark.parametrize("name", layout.RECORDS)
def test_pages_round_trip(name, page_size):
    record = layout.RECORDS[name]
    buffer = torch.full((6, record.payload(page_size) + 48), 0xFF, dtype=torch.uint8)
    capacity = 6 * page_size
    absent = torch.tensor([-1, capacity, 2**31 - 1], dtype=torch.int32)
    slots = torch.randperm(capacity, generator=generator(1))[:40].int()
    x = randn(len(slots) + len(absent), record.dims, seed=2)
    pages.store(x, buffer, torch.cat([slots, absent]), name, page_size)
    expected = quant.quantize_dequantize(x[: len(slots)], name)
    assert torch.equal(pages.load(buffer, slots, name, page_size), expected)
    assert not pages.load(buffer, absent, name, page_size).any()
    untouched = buffer == 0xFF
    assert int((~untouched).sum()) <= len(slots) * record.bytes
    assert untouched[:, record.bytes * page_size :].all()


def test_pages_orders_by_hand():
    for name, stride, scale_at in [("MainFp4", 288, 288 + 256), ("IndexFp4", 64, 3 * 64 + 4)]:
        record = layout.RECORDS[name]
        buffer = pages.new_pages(2, name, 3)
        data = torch.arange(record.data_bytes, dtype=torch.uint8)[None]
        scales = torch.arange(101, 101 + record.scale_bytes, dtype=torch.uint8)[None]
        pages.write_rows(quant.Quantized(data, scales), buffer, torch.tensor([4]), name, 3)
        assert torch.equal(buffer[1, stride : stride + record.data_bytes], data[0])
        assert torch.equal(buffer[1, scale_at : scale_at + record.scale_bytes], scales[0])
        assert not buffer[0].any()


# ---- rope


@pytest.mark.parametrize(("name", "kind"), [("compressed", COMPRESSED), ("window", WINDOW_ONLY)])
def test_rope_golden(name, kind):
    archive = golden.load("rope")
    positions = tensor(archive, "positions")
    assert same_bits(rope.angles(positions, **kind), tensor(archive, f"angles_{name}"))
    cos_sin = rope.cos_sin_table(1 << 20, **kind)
    x = tensor(archive, f"x_{name}")
    assert same_bits(rope.rotate(x, positions, cos_sin), tensor(archive, f"rotated_{name}"))
    assert same_bits(rope.derotate(x, positions, cos_sin), tensor(archive, f"derotated_{name}"))
    heads = x[:, None].expand(-1, 3, -1)
    assert same_bits(
        rope.rotate(heads, positions, cos_sin)[:, 2], tensor(archive, f"rotated_{name}")
    )


@pytest.mark.parametrize("name", STACKS)
def test_rope_angles_of_every_layer(name):
    archive = golden.load(name)
    for layer, ratio in enumerate(RATIOS):
        expected = tensor(archive, f"L{layer}.angles")
        kind = COMPRESSED if ratio else WINDOW_ONLY
        assert same_bits(rope.angles(torch.arange(len(expected)), **kind), expected)


def test_rope_table_limits():
    for max_pos in (0, 2**24 + 1):
        with pytest.raises(ValueError, match="max_pos must be 1 to 16777216"):
            rope.cos_sin_table(max_pos, **COMPRESSED)
    x = randn(2, 512)
    assert same_bits(rope.rotate(x, torch.tensor([-1, 0]), table()), x)


# ---- compress


def csa2_compressor(archive: dict, layer: int, precision: torch.dtype) -> compress.Compressor:
    weight = tensor(archive, f"L{layer}.comp_norm_weight")
    return compress.Compressor(RATIOS[layer], weight, meta(archive)["eps"], precision=precision)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("name", STACKS)
def test_compress_golden(name, layer, precision):
    archive = golden.load(name)
    stage, cos_sin = csa2_compressor(archive, layer, precision), table()
    gate = tensor(archive, f"L{layer}.comp_gate") if RATIOS[layer] == 2 else None
    latent = stage.latent(stage.pool(tensor(archive, f"L{layer}.comp_kv"), gate))
    expected = tensor(archive, f"L{layer}.latent")
    assert_ulp(latent, expected)
    main = stage.main_rows(expected, cos_sin)
    assert same_bits(main, tensor(archive, f"L{layer}.main_rotated"))
    main = quant.quantize_dequantize(main, "MainFp4")
    assert same_bits(main.bfloat16(), tensor(archive, f"L{layer}.main_dequant"))
    keys = compress.index_keys(
        tensor(archive, f"L{layer}.index_k_projected"),
        tensor(archive, f"L{layer}.index_k_norm_weight"),
        stage.eps,
        stage.entry_positions(len(latent)),
        cos_sin,
        precision,
    )
    expected = tensor(archive, f"L{layer}.index_k_rotated")
    assert_ulp(keys, expected)
    keys = quant.quantize_dequantize(expected, "IndexFp4")
    assert same_bits(keys.bfloat16(), tensor(archive, f"L{layer}.index_k_dequant"))


@pytest.mark.parametrize(
    ("layer", "prefix", "result", "ratio"),
    [(1, "comp", "main_rotated", 4), (1, "index_comp", "index_k_rotated", 4),
     (2, "comp", "main_rotated", 128)],
)  # fmt: skip
def test_compress_v4_golden(layer, prefix, result, ratio):
    archive = golden.load("v4_small")
    kv, gate, bias, weight = (
        tensor(archive, f"L{layer}.{prefix}_{part}")
        for part in ("kv", "gate", "bias", "norm_weight")
    )
    stage = compress.Compressor(ratio, weight, 1e-6, bias, ratio == 4, border=torch.float32)
    rows = stage.main_rows(stage.latent(stage.pool(kv, gate)), table())
    torch.testing.assert_close(rows, tensor(archive, f"L{layer}.{result}"), rtol=0, atol=3e-6)


def test_compress_ratio_1_is_the_norm_of_the_projection():
    kv, weight = randn(9, 512), randn(512, seed=1, dtype=torch.float32)
    latent = compress.Compressor(1, weight, 1e-20).latent(kv)
    normed = torch.nn.functional.rms_norm(kv.double(), (512,), weight.double(), 1e-20)
    assert same_bits(latent, normed.float().bfloat16())


def test_hadamard():
    x = randn(5, 128)
    matrix = torch.ones(1, 1)
    for _ in range(7):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    expected = x.double() @ matrix.double() * 128**-0.5
    torch.testing.assert_close(compress.hadamard(x.float()).double(), expected, rtol=0, atol=1e-5)
    assert compress.hadamard(x).dtype == torch.bfloat16


@pytest.mark.parametrize("chunk", ["token", 3, "ratio-1", "ratio+1"])
@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
def test_compress_does_not_depend_on_the_cuts(ratio, chunk):
    tokens = 2 * ratio + 9
    stage, kv, gate = v4_like(ratio, tokens)
    size = {"token": 1, 3: 3, "ratio-1": max(ratio - 1, 1), "ratio+1": ratio + 1}[chunk]
    whole = stage.latent(stage.pool(kv, gate))
    assert len(whole) == tokens // ratio
    span = {1: 1, 4: 8}.get(ratio, ratio)
    tail = torch.full((2, span + 3, kv.shape[1]), torch.nan)
    found = []
    for start in range(0, tokens, size):
        own = [x if x is None else x[start : start + size] for x in (kv, gate)]
        entry, pooled = stage.pool_step(*own, start, tail)
        assert entry == len(found)
        found += stage.latent(pooled)
        if ratio > 1:
            compress.write_tail(tail, *own, start)
    assert same_bits(torch.stack(found), whole)
    if ratio > 1:
        for position in range(max(0, tokens - span - 3), tokens):
            assert torch.equal(tail[0, position % (span + 3)], kv[position])


def test_compress_overlap_gives_the_missing_group_no_weight():
    stage, kv, gate = v4_like(4, 8)
    alone = (gate[:4, 512:] + stage.bias[:, 512:]).softmax(0) * kv[:4, 512:]
    torch.testing.assert_close(stage.pool(kv, gate)[0].float(), alone.sum(0))
    with pytest.raises(ValueError, match="entry 1 needs rows from 0 on"):
        stage.pool_step(kv[4:], gate[4:], 4, None)


def test_compress_leaves_stored_entries_alone():
    stage, kv, gate = v4_like(4, 19)
    whole = stage.pool(kv, gate)
    for end, stored in ((10, 2), (12, 2), (19, 2), (19, 4)):
        entry, pooled = stage.pool_step(kv[3:end], gate[3:end], 3, None, stored)
        assert entry == stored
        torch.testing.assert_close(pooled, whole[stored : end // 4])


# ---- index


@pytest.mark.parametrize("layer", [1, 3, 4])
@pytest.mark.parametrize("name", STACKS)
def test_index_golden(name, layer):
    archive = golden.load(name)
    rotated = tensor(archive, f"L{layer}.index_q_rotated")
    no_turn = torch.full((len(rotated),), -1)
    query = index.quantize_query(rotated, no_turn, table())
    q = index.dequantize_query(query)
    assert same_bits(q.bfloat16(), tensor(archive, f"L{layer}.index_q_dequant"))
    keys = quant.quantize(tensor(archive, f"L{KV_SOURCE[layer]}.index_k_rotated"), "IndexFp4")
    weights = tensor(archive, f"L{layer}.index_weights")
    expected = tensor(archive, f"L{layer}.index_scores")
    limit = 1e-6 * expected.abs().amax(-1, keepdim=True)
    k = quant.dequantize(*keys, "IndexFp4")
    for scores in (
        index.index_scores(q, k, weights),
        index.index_scores(q, k, weights, torch.float32),
        index.index_scores_exact(query, *keys, weights),
    ):
        assert ((scores - expected).abs() <= limit).all()


def test_index_score_formula():
    q = torch.zeros(1, 2, 128)
    q[0, 0, 0], q[0, 1, 0] = -1, 3
    k, weights = torch.zeros(1, 128), torch.tensor([[1.0, -2.0]])
    k[0, 0] = 0.5
    for scores in (index.index_scores, index.index_scores_bf16):
        assert scores(q, k, weights).tolist() == [[-3.0]]  # ReLU, then the weight, then the sum


def test_index_fma_rounds_once():
    a, b, c = (randn(400, seed=s, dtype=torch.float32) for s in (1, 2, 3))
    c *= torch.tensor(2.0) ** torch.arange(-60, 60).repeat(4)[:400]
    # product + addend just above, at and below the middle of two floats, by less than FP64 shows
    tie = torch.tensor([1 + 2.0**-12])
    a, b = torch.cat([a, tie, tie]), torch.cat([b, tie, tie])  # tie^2 = 1 + 2^-11 + 2^-24
    c = torch.cat([c, torch.tensor([2.0**-80, -(2.0**-80)])])
    result = index._fma(a, b, c).tolist()
    for x, y, z, got in zip(a.tolist(), b.tolist(), c.tolist(), result, strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        near = torch.tensor(float(exact))
        around = [float(torch.nextafter(near, torch.tensor(to))) for to in (-torch.inf, torch.inf)]
        best = min([float(near), *around], key=lambda v: abs(Fraction(v) - exact))
        assert Fraction(got) == Fraction(best)


def test_index_exact_order_is_independent_of_scale_spread():
    q, k = randn(3, 8, 128), randn(40, 128, seed=1)
    q[..., :32] *= 2.0**9
    k[:, 96:] *= 2.0**-11
    query = index.quantize_query(q, torch.arange(3), table())
    keys = quant.quantize(k, "IndexFp4")
    weights = randn(3, 8, seed=2, dtype=torch.float32)
    near = index.index_scores(
        index.dequantize_query(query), quant.dequantize(*keys, "IndexFp4"), weights
    )
    exact = index.index_scores_exact(query, *keys, weights)
    assert ((near - exact).abs() <= 1e-6 * near.abs().amax(-1, keepdim=True)).all()


def test_index_fp8_query():
    q = randn(3, 4, 128)
    query = index.quantize_query(q, torch.arange(3), table(), "IndexFp8", True)
    assert query.codes.shape == (3, 4, 128) and query.scales.dtype == torch.float32
    turned = compress.hadamard(rope.rotate(q, torch.arange(3), table()))
    assert torch.equal(index.dequantize_query(query), quant.quantize_dequantize(turned, "IndexFp8"))
