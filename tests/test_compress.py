"""compress: bytes of entries, against the reference, golden tensors and the numerics contract."""

import pytest
import torch

import flash_csa as fc
from compress_case import (
    CPU,
    KINDS,
    MAX_POS,
    V4,
    Cache,
    Chunk,
    Kind,
    call,
    every_kind,
    every_tailed_kind,
    one_call,
    pack,
    projections,
    same,
    step,
    table,
    weights,
)
from flash_csa.reference import pages as ref_pages
from flash_csa.reference import quant
from flash_csa.reference.compress import Compressor, hadamard
from flash_csa.reference.rope import rotate
from golden import bf16
from golden import load as golden
from reference_data import assert_ulp, sqrt_fp32


def norm_fp32(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of BF16 rows as the numerics contract orders it: 32 strided partial sums of exact
    squares, a halving tree, 1 / sqrt, two products and one rounding."""
    lanes = torch.zeros(*x.shape[:-1], 32)
    for square in x.float().square().unflatten(-1, (-1, 32)).unbind(-2):
        lanes = lanes + square
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    factor = 1 / sqrt_fp32(lanes / x.shape[-1] + eps)
    return (x.float() * factor * weight).bfloat16()


def positions(kind: Kind, entries: int) -> torch.Tensor:
    return torch.arange(entries) * kind.ratio


# ---- Bytes of entries


@every_kind
def test_latents_are_those_of_the_reference(kind, device):
    """FP32 against FP64 sums. Over 8 and 128 rows a pooled value may cancel to near 0, where the
    error is a share of the row's size (about 1), not of the value."""
    tokens = 520 if kind.ratio < 128 else 24 * 128
    _, got = one_call(kind, tokens, device)
    made = weights(kind)
    stage = Compressor(kind.ratio, made["norm_weight"], kind.eps, made.get("bias"), kind.overlap)
    want = stage.latent(stage.pool(*projections(kind, tokens)))
    if kind.ratio <= 2:
        assert_ulp(got, want)
    assert ((got - want).abs() <= 2.0**-7 * want.abs() + 2.0**-16).all()
    assert (got != want).float().mean() <= 5e-4


@pytest.mark.case("Round to bf16 before quantising")
def test_every_border_rounds(device):
    """Ratio 1, where each step of the unfused chain has one FP32 result: byte for byte."""
    kind = Kind(1, index=None, projected=False)
    cache, latents = one_call(kind, 4096, device)
    kv, _ = projections(kind, 4096)
    weight = weights(kind)["norm_weight"]
    assert torch.equal(latents, norm_fp32(kv, weight, kind.eps))
    rows = rotate(latents, positions(kind, 4096), table(CPU))
    assert same(cache.records(0, 4096), quant.quantize(rows, "MainFp4"))
    # Negative control: the rotated dims, quantised from the FP32 value behind the last rounding.
    unrounded = rotate(latents.float(), positions(kind, 4096), table(CPU))
    codes, skipped = (quant.quantize(x, "MainFp4").data[:, 224:] for x in (rows, unrounded))
    assert (codes != skipped).float().mean() > 0.005


@pytest.mark.case("CPU equals GPU")
def test_rotation_of_entries_is_not_fused(device):
    """Each product and each sum rounds. MixedFp8 keeps the rotated dims in BF16, where it shows."""
    kind = Kind(1, main="MixedFp8", index=None, projected=False)
    cache, latents = one_call(kind, MAX_POS, device)
    at = positions(kind, MAX_POS)
    turned = cache.records(0, MAX_POS)[0][:, 448:].contiguous().view(torch.bfloat16)
    assert torch.equal(turned, rotate(latents, at, table(CPU))[:, 448:])
    # Control: the first product exact.
    even, odd = latents[:, 448::2].double(), latents[:, 449::2].float()
    cos, sin = table(CPU)[at].chunk(2, -1)
    fused = (even * cos - (odd * sin).double()).float().bfloat16()
    assert 0 < (fused != turned[:, ::2]).sum() < 100


@pytest.mark.case("E2M1 ties")
@pytest.mark.parametrize("repeats", [1, 9])  # a short and a long step
def test_ties_of_every_scale(repeats, device):
    """Through the norm: two huge channels make it an exact power of two, its weight undoes it."""
    ties = [6, 0.25, -0.25, 0.75, -0.75, 1.25, -1.25, 1.75, -1.75, 2.5, -2.5, 3.5, -3.5, 5, -5, 0]
    codes = torch.arange(1, 127).repeat(repeats)
    kv = torch.zeros(len(codes), 512)
    kv[:, 32:48] = torch.tensor(ties) * quant.decode_e4m3(codes)[:, None]
    kv[:, 510:] = 2.0**40
    kind = Kind(1, index=None, projected=False)
    cache = Cache(kind, 1, len(codes), device)
    weight = torch.full((512,), 2.0**36)
    step(cache, [Chunk(0, 0, len(codes))], [(kv.bfloat16(), None)], norm_weight=weight)
    data, scales = cache.records(0, len(codes))
    want = torch.tensor(list(bytes.fromhex("07282A4A4C6C6E0E")), dtype=torch.uint8)
    assert torch.equal(scales[:, 2], codes.to(torch.uint8))
    assert torch.equal(data[:, 16:24], want.expand(len(codes), 8))


@pytest.mark.parametrize("tokens", [100, 1100])  # a short and a long step
def test_scales_at_the_ends(tokens, device):
    """Groups whose quotients exceed 7 or whose scale saturates: exact, given the latent."""
    kind = Kind(1, index=None, projected=False)
    weight = 2.0 ** torch.arange(-16, 16).repeat_interleave(16)
    cache, latents = one_call(kind, tokens, device, norm_weight=weight)
    want = quant.quantize(rotate(latents, positions(kind, tokens), table(CPU)), kind.main)
    assert same(cache.records(0, tokens), want)


@every_kind
def test_records_follow_from_the_latent(kind, device):
    """RoPE at the group's first position, Hadamard, record: exact, given the latent."""
    tokens = 300 if kind.ratio < 128 else 5 * 128
    made = {}
    if kind.projected:  # one-hot rows: the projected key is a part of the latent, exactly
        dims = torch.randperm(512)[:128]
        made["key_weight"] = torch.eye(512).bfloat16()[dims]
    cache, latents = one_call(kind, tokens, device, **made)
    at = positions(kind, len(latents))
    want = []
    if kind.main:
        want += quant.quantize(rotate(latents, at, table(CPU)), kind.main)
    if kind.index:
        keys = latents
        if kind.projected:
            keys = norm_fp32(latents[:, dims], weights(kind)["key_norm_weight"], kind.eps)
        keys = rotate(keys, at, table(CPU))
        want += quant.quantize(hadamard(keys) if kind.rotate else keys, kind.index)
    assert same(cache.records(0, len(latents)), want)


@pytest.mark.parametrize("name", ["r1", "r2", "r2.hopper"])
def test_index_keys_within_bounds(name, device):
    """The projection is bounded: FP64 against FP32 sums. At most 0.05 % of the scales differ, by
    one step, and elsewhere at most 0.5 % of the codes."""
    kind = KINDS[name]
    tokens = 2000
    cache, latents = one_call(kind, tokens, device)
    made = weights(kind)
    projected = (latents.double() @ made["key_weight"].double().T).float().bfloat16()
    keys = norm_fp32(projected, made["key_norm_weight"], kind.eps)
    keys = rotate(keys, positions(kind, len(latents)), table(CPU))
    want = quant.quantize(hadamard(keys) if kind.rotate else keys, kind.index)
    data, scales = cache.records(0, len(latents))[2:]
    if kind.index == "IndexFp8":
        got, wanted = (s.view(torch.float32) for s in (scales, want.scales))
        assert ((got - wanted).abs() <= wanted * 2.0**-7).all()
        differs = torch.zeros(len(data), 1, dtype=torch.bool)
    else:
        step_size = (scales.int() - want.scales.int()).abs()
        assert step_size.max() <= 1
        differs = step_size > 0
    assert differs.float().mean() <= 5e-4
    same_scale = ~differs.repeat_interleave(data.shape[1] // differs.shape[1], 1)
    assert (data != want.data)[same_scale].float().mean() <= 0.005


@pytest.mark.case("Flags take effect")
@pytest.mark.parametrize("name", ["r1", "r4.index"])
def test_rotate_changes_keys(name, device):
    kind = KINDS[name]
    plain, _ = one_call(kind, 64, device, rotate=False)
    turned, _ = one_call(kind, 64, device, rotate=True)
    codes = plain.records(0, 64 // kind.ratio)[-2], turned.records(0, 64 // kind.ratio)[-2]
    assert (codes[0] != codes[1]).float().mean() > 0.5


@pytest.mark.case("Ratio 1 mode")
def test_ratio_one_is_the_norm_alone(device):
    kind = KINDS["r1"]
    _, latents = one_call(kind, 33, device)
    kv, _ = projections(kind, 33)
    assert torch.equal(latents, norm_fp32(kv, weights(kind)["norm_weight"], kind.eps))
    with pytest.raises(ValueError, match="gate"):
        cache = Cache(kind, 1, 33, device)
        _, _, batch = pack(kind, [Chunk(0, 0, 33)], [(kv, None)])
        call(cache, kv, kv.float(), batch, cache.slots[0])
    for ratio in (0, 3):
        with pytest.raises(ValueError, match="ratio"):
            one_call(kind, 33, device, ratio=ratio)


@pytest.mark.case("Prefill versus decode compression")
def test_first_overlapping_entry_has_no_previous_group(device):
    """Entry 0 pools its own four rows only, whatever stands in the other columns."""
    kind = KINDS["r4"]
    _, want = one_call(kind, 4, device)
    kv, gate = (x.clone() for x in projections(kind, 4))
    for bad in (torch.nan, torch.inf, 1e30):
        kv[:, :512], gate[:, :512] = bad, bad
        cache = Cache(kind, 1, 1, device)
        latents = torch.empty(4, 512, dtype=torch.bfloat16, device=device)
        step(cache, [Chunk(0, 0, 4)], [(kv, gate)], latent_out=latents)
        assert torch.equal(latents[3:].cpu(), want)


@every_kind
def test_bad_rows_spoil_their_own_entries_only(kind, device):
    """NaN or Inf in one token: NaN scales and zero codes in the entries that pool it."""
    tokens = 40 if kind.ratio < 128 else 4 * 128
    clean, _ = one_call(kind, tokens, device)
    hit = tokens // 2
    for bad in (torch.nan, torch.inf, -torch.inf):
        kv, gate = projections(kind, tokens)
        kv = kv.clone()
        kv[hit] = bad
        cache = Cache(kind, 1, tokens // kind.ratio, device)
        step(cache, [Chunk(0, 0, tokens)], [(kv, gate)])
        entries = tokens // kind.ratio
        spoilt = {hit // kind.ratio, hit // kind.ratio + 1} if kind.overlap else {hit // kind.ratio}
        keep = [j for j in range(entries) if j not in spoilt]
        for part, want in zip(cache.records(0, entries), clean.records(0, entries), strict=True):
            assert torch.equal(part[keep], want[keep])
        for pages in filter(None, (cache.main, cache.index)):
            slots = cache.slots[0, sorted(spoilt)]
            rows = ref_pages.load(pages.data.cpu(), slots, pages.record, pages.page_size)
            assert rows.isnan().all()


@every_tailed_kind
def test_hostile_gates(kind, device):
    """Gates far apart, infinite or NaN in single channels: the CPU's latents, bit for bit; NaN in
    every entry that pools a NaN."""
    tokens = 2048
    random = torch.Generator().manual_seed(5)
    kv, gate = (x.clone() for x in projections(kind, tokens))
    kv *= 0.3
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 100, -100, 85, -1e-42])
    rows = torch.randperm(tokens, generator=random)[: tokens // 9]
    channels = torch.randint(kind.width, rows.shape, generator=random)
    gate[rows, channels] = values[torch.randint(len(values), rows.shape, generator=random)]
    latents = {}
    for where in {CPU, device}:
        latents[where] = torch.zeros(tokens, kind.dim, dtype=torch.bfloat16, device=where)
        cache = Cache(kind, 1, tokens // kind.ratio, where)
        step(cache, [Chunk(0, 0, tokens)], [(kv, gate)], latent_out=latents[where])
    assert torch.equal(*(x.cpu().view(torch.int16) for x in (latents[device], latents[CPU])))
    if not kind.overlap:
        entries = latents[device][kind.ratio - 1 :: kind.ratio]
        spoilt = gate.view(-1, kind.ratio, kind.width).isnan().any((1, 2))
        assert entries[spoilt].isnan().all()


@pytest.mark.case("RoPE of entries and inverse rotation")
@pytest.mark.parametrize("name", ["r1", "r2", "r4.index"])
def test_far_entries_rotate_at_their_first_token(name, device):
    """A request that continues at 5000: same latents as at 0, rotated at j * ratio."""
    kind, first = KINDS[name], 5000
    kv, gate = projections(kind, 24)
    cache = Cache(kind, 1, MAX_POS // kind.ratio, device)
    latents = torch.zeros(24, kind.dim, dtype=torch.bfloat16, device=device)
    far = [
        None if x is None else torch.cat([x.new_zeros(first, x.shape[1]), x]) for x in (kv, gate)
    ]
    # entry_first: the overlapping entry at the border would need the tail
    entry = first // kind.ratio + (1 if kind.overlap else 0)
    stored = torch.tensor([entry], dtype=torch.int32)
    step(cache, [Chunk(0, first, 24)], [far], latent_out=latents, entry_first=stored)
    count = (first + 24) // kind.ratio - entry
    rows = latents.cpu()[kind.ratio - 1 :: kind.ratio][-count:]
    keys = rotate(rows, (entry + torch.arange(count)) * kind.ratio, table(CPU))
    record = kind.main or kind.index
    want = quant.quantize(hadamard(keys) if kind.main is None else keys, record)
    slots = cache.slots[0, entry : entry + count]
    pages = cache.main or cache.index
    got = ref_pages.read_rows(pages.data.cpu(), slots, record, pages.page_size)
    assert same(got, want)


# ---- Golden tensors


@pytest.mark.parametrize("file", ["csa2_short", "csa2_small"])
@pytest.mark.parametrize("layer, ratio", [("L1", 2), ("L3", 1)])
def test_golden_entries(file, layer, ratio, device):
    data = golden(file)
    want = bf16(data[f"{layer}.latent"])
    kind = Kind(ratio, index=None, projected=False)
    kv = data[f"{layer}.comp_kv"]
    gate = torch.from_numpy(data[f"{layer}.comp_gate"]) if ratio == 2 else None
    kv = torch.from_numpy(kv) if ratio == 2 else bf16(kv)
    cache = Cache(kind, 1, len(want), device)
    latents = torch.zeros(len(kv), 512, dtype=torch.bfloat16, device=device)
    norm_weight = torch.from_numpy(data[f"{layer}.comp_norm_weight"])
    step(cache, [Chunk(0, 0, len(kv))], [(kv, gate)], norm_weight=norm_weight, latent_out=latents)
    got = latents.cpu()[ratio - 1 :: ratio]
    assert_ulp(got, want)
    main = fc.load(cache.main, cache.slots[0].to(device)).cpu()
    exact = (got == want).all(1)
    assert exact.float().mean() > 0.95
    assert torch.equal(main[exact], bf16(data[f"{layer}.main_dequant"])[exact])


@pytest.mark.parametrize("file", ["csa2_short", "csa2_small"])
@pytest.mark.parametrize("layer, ratio", [("L1", 2), ("L3", 1)])
def test_golden_keys(file, layer, ratio, device):
    """From the golden projected key on. Two large values make the first norm an exact power of
    two, its weight undoes it, and one-hot key weights hand dims 0..127 through unchanged."""
    data = golden(file)
    projected = bf16(data[f"{layer}.index_k_projected"])
    # Through ratio 1, where every row is an entry: that of entry j stands at its position.
    kv = torch.zeros(len(projected) * ratio, 512, dtype=torch.bfloat16)
    kv[::ratio, :128], kv[::ratio, 510:] = projected, 2.0**20
    cache = Cache(KINDS["r1"], 1, len(kv), device)
    step(
        cache,
        [Chunk(0, 0, len(kv))],
        [(kv, None)],
        norm_weight=torch.full((512,), 2.0**16),
        key_weight=torch.eye(512)[:128].bfloat16(),
        key_norm_weight=torch.from_numpy(data[f"{layer}.index_k_norm_weight"]),
    )
    got = fc.load(cache.index, cache.slots[0, ::ratio].contiguous().to(device)).cpu()
    want = bf16(data[f"{layer}.index_k_dequant"])
    assert (got != want).float().mean() <= 1e-4


@pytest.mark.parametrize(
    "layer, prefix, kind",
    [
        ("L1", "comp", KINDS["r4"]),
        ("L1", "index_comp", Kind(4, dim=128, main=None, **V4)),
        ("L2", "comp", KINDS["r128"]),
    ],
)
def test_golden_v4(layer, prefix, kind, device):
    """The golden tensors are FP32 throughout: within the roundings to BF16 and to the record."""
    data = {k: torch.from_numpy(v) for k, v in golden("v4_small").items() if k != "meta"}
    kv, gate = data[f"{layer}.{prefix}_kv"], data[f"{layer}.{prefix}_gate"]
    norm_weight, bias = data[f"{layer}.{prefix}_norm_weight"], data[f"{layer}.{prefix}_bias"]
    want = data[f"{layer}.index_k_rotated" if kind.main is None else f"{layer}.main_rotated"]
    cache = Cache(kind, 1, len(want), device)
    latents = torch.zeros(len(kv), kind.dim, dtype=torch.bfloat16, device=device)
    made = {"norm_weight": norm_weight, "bias": bias, "latent_out": latents}
    step(cache, [Chunk(0, 0, len(kv))], [(kv, gate)], **made)
    rows = latents.cpu()[kind.ratio - 1 :: kind.ratio]
    exact = Compressor(kind.ratio, norm_weight, kind.eps, bias, kind.overlap, border=torch.float32)
    pooled = exact.latent(exact.pool(kv, gate))
    assert ((rows - pooled).abs() <= 2.0**-7 * pooled.abs() + 3e-6).all()
    compress_table = torch.cat([data["cos_compress"], data["sin_compress"]], 1)
    turned = rotate(rows.float(), positions(kind, len(rows)), compress_table)
    norms = want.square().sum(-1).sqrt()
    assert ((turned - want).square().sum(-1).sqrt() <= 2.0**-8 * norms).all()
    pages = cache.main or cache.index
    slots = cache.slots[0].to(device)
    decoded = fc.load(pages, slots, dtype=torch.float32).cpu()
    error = (decoded - want).square().sum(-1).sqrt()
    assert (error <= (0.04 if kind.main else 0.2) * norms).all()
