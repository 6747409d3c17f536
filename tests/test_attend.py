"""attend: against FP64 on exactly decoded records, golden tensors, and faults from the field."""

from dataclasses import replace

import pytest
import torch

import flash_csa
import golden
from attend_data import (
    EITHER_LIST,
    Case,
    assert_close,
    column_parts,
    filled_pages,
    lists_of,
    random_case,
    run,
    same,
    schedule_of,
    selection,
    spread,
)
from flash_csa.reference import attend as reference
from flash_csa.reference import rope, step
from reference_data import (
    KV_SOURCE,
    RATIOS,
    STACKS,
    layer_rows,
    meta,
    randn,
    same_bits,
    table,
    tensor,
)

# ---- Against FP64 on exactly decoded records


@pytest.mark.case("Head counts and real dispatch")
@pytest.mark.parametrize("heads", [1, 7, 8, 16, 32, 48, 64, 128, 130])
def test_any_number_of_heads(heads, device):
    case = random_case(heads=heads, lengths=[200, 64, 1], window_lengths=[128, 3, 0])
    assert_close(case, *run(case, device))
    assert_close(case, *run(case, device, dtype=torch.bfloat16))
    assert_close(case, *run(case, device, dtype=torch.bfloat16, batch_invariant=True))


@pytest.mark.case("Output offset and stride")
@pytest.mark.parametrize("rows", [65, 96])
def test_more_rows_than_heads(rows, device):
    case = random_case(heads=64, lengths=[5] * rows, window_lengths=[3] * rows, width=8)
    assert_close(case, *run(case, device))


@pytest.mark.case("Real FP4 storage")
@pytest.mark.parametrize(("main", "window"), EITHER_LIST)
def test_every_record_in_either_list(main, window, device):
    case = random_case(main=main, window=window)
    assert_close(case, *run(case, device))
    bf16, lse = run(case, device, dtype=torch.bfloat16)
    assert_close(case, bf16, lse)


@pytest.mark.parametrize("record", ["MainFp4", "MixedFp8", "WindowFp8"])
def test_contiguous_is_a_selection_of_every_visible_entry(record, device):
    page_size, columns = 8, 40
    pages = flash_csa.Pages.empty(3 * columns, record, page_size)
    order = torch.randperm(3 * columns, dtype=torch.int32).view(3, columns)
    order[1, 3] = -1  # entries 24..31 of request 1 are elsewhere
    order[2, 5:] = 1 << 29  # beyond the pages
    every = torch.arange(pages.num_slots, dtype=torch.int32)
    flash_csa.store(randn(pages.num_slots, 512, seed=1), pages, every)
    request = torch.tensor([0, 1, 1, 2, 0, -1, 3], dtype=torch.int32)
    n_vis = torch.tensor([320, 200, 26, 100, 0, 50, 50], dtype=torch.int32)
    q = randn(7, 6, 512, seed=2)
    case = Case(q=q, main=pages, contiguous=(order, request, n_vis))
    out, lse = run(case, device)
    assert (out[4:] == 0).all() and (lse[4:] == torch.inf).all()  # no entry, no such request
    slots = order.long().repeat_interleave(page_size, 1) * page_size
    slots = (slots + torch.arange(page_size).repeat(columns)).clamp(-1, 2**31 - 1).int()
    chosen = selection(slots[request[:4]], n_vis[:4])
    selected = Case(q=q[:4], main=pages, selection=chosen)
    assert same(run(selected, device), (out[:4], lse[:4]))
    assert_close(selected, out[:4], lse[:4])


@pytest.mark.parametrize("rows", [4, 70])
@pytest.mark.parametrize("heads", [8, 24, 64, 128])
def test_negative_scale_is_that_of_negated_queries(heads, rows, device):
    lengths = [200, 64, 1, 0] + [70] * (rows - 4)
    case = random_case(
        heads=heads, lengths=lengths, window_lengths=[128, 3, 0, 0] + [9] * (rows - 4)
    )
    turned = replace(case, q=-case.q, softmax_scale=-case.softmax_scale)
    for dtype in (torch.float32, torch.bfloat16):
        results = run(turned, device, dtype=dtype)
        assert_close(case, *results)
        assert_close(turned, *results)


def test_bf16_output_has_bf16_probabilities(device):
    """Their sum, and so the lse, stays in FP32; the output moves by one rounding of each."""
    case = random_case()
    (f32, lse), (bf16, same_lse) = run(case, device), run(case, device, dtype=torch.bfloat16)
    assert ((bf16 - f32).abs() <= 2.0**-8 * (spread(case) + f32.abs())).all()
    if device.type == "cpu":
        assert torch.equal(lse, same_lse) and not same_bits(f32.bfloat16(), bf16)


@pytest.mark.case("Tests that can fail")
def test_bf16_roundings_have_no_bias(device):
    """Truncated probabilities, or outputs, stay within every bound and shrink all values."""
    case = random_case(heads=16, lengths=[256] * 4, window_lengths=[128] * 4)
    records, lists = case.reference_lists()
    expected, _ = reference.attend(case.q, records, lists, sink=case.sink)
    out, _ = run(case, device, dtype=torch.bfloat16)
    factor = (out.double() * expected).sum() / expected.square().sum()
    assert abs(factor - 1) < 2.0**-12


def test_error_is_not_twice_that_of_bf16_pytorch(device):
    case = random_case(heads=16, lengths=[256] * 4, window_lengths=[128] * 4)
    records, lists = case.reference_lists()
    expected, _ = reference.attend(case.q, records, lists, sink=case.sink)
    plain, _ = reference.attend_in_steps(case.q, records, lists, sink=case.sink)
    allowed = 2 * (plain.bfloat16() - expected).abs().max() + 2.0**-8 * expected.abs().max()
    out, _ = run(case, device, dtype=torch.bfloat16)
    assert (out - expected).abs().max() <= allowed


# ---- Golden tensors


def golden_case(archive: dict, layer: int) -> Case:
    rows = tensor(archive, "rows").long()
    window = meta(archive)["window"]
    pages, slots = filled_pages("WindowFp8", 64, golden_rows(archive, layer, "window"))
    at, lengths = step.window_lists(rows, window)
    lists = flash_csa.Window(torch.where(at < 0, -1, slots[at.long()]), lengths)
    parts = {"window_pages": pages, "window": lists}
    if KV_SOURCE[layer] is not None:
        parts["main"], slots = filled_pages(
            "MainFp4", 16, golden_rows(archive, KV_SOURCE[layer], "main")
        )
        at = tensor(archive, f"L{layer}.topk")[rows]
        full = torch.full_like(layer_rows(archive, layer)[1], at.shape[1]).int()
        parts["selection"] = selection(torch.where(at < 0, -1, slots[at.long()]), full)
    q, sink = (tensor(archive, f"L{layer}.{name}") for name in ("q", "sink"))
    return Case(q=q, sink=sink, **parts)


def golden_rows(archive: dict, layer: int, kind: str) -> torch.Tensor:
    """Rows whose records decode to the golden ones: dequantised FP8 is stable, FP4 is not."""
    name = "window_dequant" if kind == "window" else "main_rotated"
    return tensor(archive, f"L{layer}.{name}")


@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("name", STACKS)
def test_golden(name, layer, device):
    archive = golden.load(name)
    case = golden_case(archive, layer)
    records, lists = case.reference_lists()
    asked = {"q": case.q, "records": records, "lists": lists, "sink": case.sink}
    bound, lse_bound = reference.error_bounds(**asked, bf16=False)
    out, lse = run(case, device)
    expected, expected_lse = (tensor(archive, f"L{layer}.attend_{x}") for x in ("out_fp32", "lse"))
    assert_close(case, out, lse)
    assert ((out - expected).abs() <= 2 * bound).all()  # both may be one bound off
    assert ((lse - expected_lse).abs() <= 2 * lse_bound).all()
    positions = tensor(archive, "rows").int()
    cos_sin = table(300, RATIOS[layer])
    golden_turned = tensor(archive, f"L{layer}.attend_out_derotated")
    turned = reference.derotated_output(out, positions, cos_sin)
    assert (turned.view(torch.int16) == golden_turned.view(torch.int16)).float().mean() > 0.99
    # The golden probabilities are FP32: BF16 ones are one bound away, each side's own roundings
    # too, which a rotation mixes.
    turned, _ = run(case, device, dtype=torch.bfloat16,
                    derotate=(positions.to(device), cos_sin.to(device)))  # fmt: skip
    own, _ = reference.error_bounds(**asked, bf16=True)
    allowed = own + bound + 2.0**-8 * expected.abs()
    cos, sin = cos_sin[positions.long()].abs()[:, None].chunk(2, -1)
    even, odd = allowed[..., 448::2].clone(), allowed[..., 449::2].clone()
    allowed[..., 448::2] = cos * even + sin * odd
    allowed[..., 449::2] = sin * even + cos * odd
    allowed[..., 448:] += 2.0**-8 * (turned.float().abs() + golden_turned.float().abs())[..., 448:]
    assert ((turned.float() - golden_turned.float()).abs() <= allowed).all()
    cosine = torch.cosine_similarity(turned.double(), golden_turned.double(), dim=-1)
    assert (1 - cosine <= 1e-5).all()  # 5e-6 of ours, and two roundings of theirs


@pytest.mark.parametrize("layer", range(3))
def test_golden_v4(layer, device):
    """V4's keys are FP32 there; as MixedFp8 records they give nearly the same direction."""
    archive = golden.load("v4_small")
    keys, visible = tensor(archive, f"L{layer}.keys"), tensor(archive, f"L{layer}.visible")
    pages, slots = filled_pages("MixedFp8", 64, keys.bfloat16())
    q, sink = tensor(archive, f"L{layer}.q").bfloat16(), tensor(archive, f"L{layer}.sink")
    lists = torch.where(visible, slots, -1)
    full = torch.full((len(q),), lists.shape[1], dtype=torch.int32)
    case = Case(q=q, main=pages, selection=selection(lists, full), sink=sink)
    out, lse = run(case, device)
    assert_close(case, out, lse)
    expected = tensor(archive, f"L{layer}.attend_out")
    assert (torch.cosine_similarity(out, expected, dim=-1) > 0.998).all()


# ---- Hostile inputs


@pytest.mark.parametrize("size", [1.0, 30.0, 250.0])
def test_large_logits(size, device):
    """Logits up to +-1e4: one record dominates, the weights of others underflow."""
    case = random_case(heads=5)
    case = replace(case, q=(case.q * size).bfloat16())
    assert_close(case, *run(case, device))


def test_one_dominating_key(device):
    case = random_case(heads=3, lengths=[256], window_lengths=[128])
    direction = randn(512, seed=5)
    slot = int(case.selection.slots[0, 77])
    flash_csa.store(direction[None] * 4, case.main, torch.tensor([slot], dtype=torch.int32))
    case = replace(case, q=direction.expand(1, 3, 512).contiguous())
    out, lse = run(case, device)
    assert_close(case, out, lse)
    value = flash_csa.load(case.main, torch.tensor([slot], dtype=torch.int32), dtype=torch.float32)
    torch.testing.assert_close(out[0], value.expand(3, 512))


@pytest.mark.case("Sink really used")
def test_sink(device):
    case = random_case(heads=7, sink=False)
    sinks = torch.tensor([0.0, -torch.inf, torch.inf, 80.0, -80.0, 3.5, -1e30])
    plain, plain_lse = run(case, device)
    out, lse = run(replace(case, sink=sinks), device)
    assert_close(replace(case, sink=sinks), out, lse)
    assert torch.equal(lse, plain_lse)
    assert (out[:, 2] == 0).all()
    for head in (1, 4, 6):
        assert torch.equal(out[:, head], plain[:, head])
    factor = 1 / (1 + (sinks[0] - lse[:3, 0]).exp())
    torch.testing.assert_close(out[:3, 0], plain[:3, 0] * factor[:, None])
    assert not torch.equal(out[:3, 0], plain[:3, 0])
    shard = replace(case, q=case.q[:, 3:6], sink=sinks[3:6].clone())  # heads of another rank
    assert torch.equal(run(shard, device)[0], out[:, 3:6])
    for wrong in (sinks[:6].clone(), sinks.double()):
        with pytest.raises(ValueError, match="sink must be"):
            run(replace(case, sink=wrong), device)


def test_nan_record_is_seen_by_its_rows_only(device):
    case = random_case(heads=2, lengths=[60, 60], window_lengths=[0, 0])
    rows = randn(1, 512)
    rows[0, 100] = torch.nan
    bad = case.selection.slots[0, 5:6]
    case.selection.slots[1, :60][case.selection.slots[1, :60] == bad] = -1
    clean = run(case, device)
    flash_csa.store(rows, case.main, bad)
    out, lse = run(case, device)
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert torch.equal(out[1], clean[0][1]) and torch.equal(lse[1], clean[1][1])


@pytest.mark.case("Masked leading chunk and empty row")
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("columns", [[0], [15], [16], [63], [64], [511], [0, 511], []])
def test_masked_leading_chunk(columns, window, device):
    case = random_case(heads=4, lengths=[512], window_lengths=[5 if window else 0], width=512)
    kept = case.selection.slots[0, columns].clone()
    case.selection.slots.fill_(-1)
    case.selection.slots[0, columns] = kept
    for asked in (case, replace(case, sink=None)):
        out, lse = run(asked, device)
        assert_close(asked, out, lse)
        if not (columns or window):
            assert (out == 0).all() and (lse == torch.inf).all()
    bare = replace(case, sink=None)
    whole, lse = run(bare, device)
    parts = [run(part, device) for part in column_parts(case, 4)]
    outs, lses = (torch.stack(x).to(device) for x in zip(*parts, strict=True))
    merged = flash_csa.merge(outs, lses).cpu()
    assert_close(bare, merged, lse)
    merged, whole = merged.bfloat16(), whole.bfloat16()
    assert ((merged - whole).abs().float() <= 2.0**-7 * whole.abs().float()).all()


@pytest.mark.case("NaN poison in unused cache")
@pytest.mark.parametrize("rows", [1, 64, 65, 129])
@pytest.mark.parametrize("length", [1, 13, 127, 128, 129])
def test_unused_bytes_do_not_matter(rows, length, device):
    results = []
    for fill in (0x00, 0xFF, 0x7F, 0x80):
        torch.manual_seed(3)
        window_lengths = [min(length, 128)] * rows
        case = random_case(heads=1, lengths=[length] * rows, window_lengths=window_lengths,
                           main=("MainFp4", 4), window=("WindowFp8", 4), entries=140, width=136,
                           fill=fill)  # fmt: skip
        behind = torch.arange(136) >= length
        case.selection.slots[:, behind] %= case.main.num_slots  # in range, and never written
        case.selection.slots[:, :length][torch.rand(rows, length) < 0.1] = -1
        results.append(run(case, device))
    assert not results[0][0].isnan().any()
    for other in results[1:]:
        assert same(results[0], other)


@pytest.mark.case("Holes in the index list")
@pytest.mark.parametrize("share", ["none", "1 %", "50 %", "alternating"])
def test_holes(share, device):
    case = random_case(heads=4, lengths=[512] * 3, window_lengths=[128, 7, 0], width=512)
    slots = case.selection.slots
    chance = {"none": 0.0, "1 %": 0.01, "50 %": 0.5, "alternating": 0.0}[share]
    hole = torch.rand(slots.shape) < chance
    if share == "alternating":
        hole[:, ::2] = True
    compact = torch.full_like(slots, -1)
    for row in range(3):
        kept = slots[row][~hole[row]]
        compact[row, : len(kept)] = kept
    slots[hole] = torch.tensor([-1, -7, 1 << 30, 2**31 - 1])[
        torch.randint(4, (int(hole.sum()),))
    ].int()
    out, lse = run(case, device)
    assert_close(case, out, lse)
    lengths = (~hole).sum(1).int()
    other = run(replace(case, selection=selection(compact, lengths)), device)
    if device.type == "cpu":  # absent records are left out before the tiles are cut
        assert same((out, lse), other)
    assert_close(case, *other)


@pytest.mark.case("All lengths zero")
@pytest.mark.parametrize("rows", [1, 32, 33])
@pytest.mark.parametrize("busy", [None, 0, -1])
def test_lengths_zero(rows, busy, device):
    lengths, window_lengths = [0] * rows, [0] * rows
    if busy is not None:
        lengths[busy] = window_lengths[busy] = 3
    case = random_case(heads=2, lengths=lengths, window_lengths=window_lengths)
    out, lse = run(case, device)
    assert_close(case, out, lse)
    idle = torch.tensor(lengths) == 0
    assert (out[idle] == 0).all() and (lse[idle] == torch.inf).all()


@pytest.mark.parametrize("wrong", [-1, -(2**31), 2**31 - 1])
def test_lengths_out_of_range_are_clamped(wrong, device):
    case = random_case(heads=2, lengths=[256, 9], window_lengths=[128, 9])
    legal = torch.tensor([min(max(wrong, 0), 256), 9], dtype=torch.int32)
    expected = run(replace(case, selection=selection(case.selection.slots, legal)), device)
    case.selection.lengths[0] = wrong
    assert same(run(case, device), expected)


@pytest.mark.case("Padded query rows")
def test_padded_rows(device):
    rows = 352
    padded = torch.zeros(rows, dtype=torch.bool)
    padded[160:165] = padded[-5:] = True
    lengths = torch.randint(0, 40, (rows,)).tolist()
    case = random_case(heads=1, lengths=lengths, window_lengths=[4] * rows, width=40)
    positions = torch.arange(rows, dtype=torch.int32)
    cos_sin = table(rows).to(device)
    expected = run(case.rows(~padded), device, dtype=torch.bfloat16,
                   derotate=(positions[~padded].to(device), cos_sin))  # fmt: skip
    case.q[padded] = torch.nan
    case.selection.slots[padded] = case.window.slots[padded] = 2**31 - 1
    positions[padded] = -1
    for lists in (0, 30):  # lists of padded rows are empty; their position alone is enough
        case.selection.lengths[padded] = case.window.lengths[padded] = lists
        out, lse = run(case, device, dtype=torch.bfloat16,
                       derotate=(positions.to(device), cos_sin))  # fmt: skip
        assert same((out[~padded], lse[~padded]), expected)
        assert (out[padded] == 0).all() and (lse[padded] == torch.inf).all()


# ---- Rotation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_derotate(dtype, device):
    """Rounded to BF16, turned back, rounded again, whatever type holds the result."""
    case = random_case(heads=3)
    positions = torch.tensor([0, 17, 255, 3], dtype=torch.int32)
    f32 = run(case, device, dtype=dtype)[0]
    turned, _ = run(case, device, dtype=dtype,
                    derotate=(positions.to(device), table(256).to(device)))  # fmt: skip
    assert turned.dtype == dtype
    assert same_bits(turned.bfloat16(), reference.derotated_output(f32, positions, table(256)))
    assert torch.equal(turned, turned.bfloat16().to(dtype))


@pytest.mark.case("RoPE of entries and inverse rotation")
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_rotation_depends_on_the_distance_alone(ratio, device):
    """One key and no sink: the output is the entry's vector, turned by position - entry * ratio."""
    cos_sin = table(3000)
    vector = randn(1, 512, seed=4)
    results = []
    for shift in (0, 1024):
        entry, position = 3 + shift // ratio, 3 * ratio + 200 + shift
        entry_at, row_at = (torch.tensor([p], dtype=torch.int32) for p in (entry * ratio, position))
        main, slots = filled_pages("MixedFp8", 4, rope.rotate(vector, entry_at, cos_sin))
        chosen = selection(slots.view(1, 1), torch.ones(1, dtype=torch.int32))
        q = rope.rotate(randn(1, 2, 512, seed=6), row_at, cos_sin)
        case = Case(q=q, main=main, selection=chosen, sink=torch.full((2,), -torch.inf))
        out, _ = run(case, device, dtype=torch.bfloat16,
                     derotate=(row_at.to(device), cos_sin.to(device)))  # fmt: skip
        back = rope.derotate(vector, row_at - entry_at, cos_sin)[0, 448:]
        assert ((out[0, :, 448:] - back).abs() <= 2.0**-6 * vector.abs().max()).all()
        results.append(out.float())
    assert ((results[0] - results[1]).abs() <= 2.0**-6 * vector.abs().max()).all()
    assert torch.equal(results[0][..., :448], results[1][..., :448])


# ---- Memory


@pytest.mark.case("Padded page stride")
@pytest.mark.parametrize("record", ["MainFp4", "WindowFp8", "MixedFp8"])
@pytest.mark.parametrize("extra", [576, 4096, "payload"])
def test_page_stride(record, extra, device):
    page_size = 16
    case = random_case(heads=2, main=(record, page_size))
    payload = flash_csa.RECORDS[record].payload(page_size)
    pages = case.main.data
    stride = payload + (payload if extra == "payload" else extra)
    stride = -(-stride // 16) * 16
    buffer = torch.full((512 + len(pages) * stride,), 0xFF, dtype=torch.uint8)
    view = buffer.as_strided((len(pages), payload), (stride, 1), 512)
    view.copy_(pages[:, :payload])
    assert same(run(replace(case, main=replace(case.main, data=view)), device), run(case, device))
    uneven = buffer.as_strided((len(pages), payload // 2), (stride, 2), 512)
    with pytest.raises(ValueError, match=r"main\.pages"):
        run(replace(case, main=replace(case.main, data=uneven)), device)


def test_no_pages(device):
    """A cache without pages is legal: every slot is absent."""
    case = random_case(heads=2)
    nothing = replace(case.main, data=case.main.data[:0])
    none = replace(case.selection, lengths=torch.zeros(4, dtype=torch.int32))
    assert same(
        run(replace(case, main=nothing), device), run(replace(case, selection=none), device)
    )


def test_no_rows(device):
    out, lse = run(random_case(lengths=[], window_lengths=[]), device)
    assert out.shape == (0, 8, 512) and lse.shape == (0, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_query_and_output_in_guard_bands(dtype, device):
    case = random_case(heads=6)
    expected, expected_lse = run(case, device, dtype=dtype)
    fused = torch.full((4, 16, 640), torch.nan, dtype=torch.bfloat16, device=device)
    q = fused[:, 5:11, 64:576].copy_(case.q)
    results = torch.full((6, 10, 768), torch.nan, dtype=dtype, device=device)
    out = results[1:5, 2:8, 128:640]
    lses = torch.full((4, 6), torch.nan, device=device)
    moved = {
        name: value if value is None else replace_tensors(value, device)
        for name, value in case.lists().items()
    }
    flash_csa.attend(q, **moved, sink=case.sink.to(device), out=out, lse=lses,
                     schedule=schedule_of(4, 6, device))  # fmt: skip
    assert same((out.cpu(), lses.cpu()), (expected, expected_lse))
    assert results.isnan().sum() == results.numel() - out.numel()


def replace_tensors(value, device):
    """A struct of tensors on another device."""
    return replace(
        value, **{k: v.to(device) for k, v in vars(value).items() if isinstance(v, torch.Tensor)}
    )


@pytest.mark.case("Moving pages")
def test_moved_pages(device):
    case = random_case(heads=2, main=("MainFp4", 16), entries=160)
    before = run(case, device)
    pages, slots = case.main.data, case.selection.slots
    sources = [1, 4, 7]
    exported = pages[sources].cpu().clone()
    assert exported.nbytes == 3 * flash_csa.RECORDS["MainFp4"].payload(16)
    grown = torch.full((len(pages) + 3, pages.shape[1]), 0xFF, dtype=torch.uint8)
    order = torch.arange(len(pages))
    order[sources] = torch.tensor([len(pages) + i for i in range(3)])
    grown[: len(pages)] = pages
    grown[sources] = 0xFF
    grown[order[sources]] = exported
    read = (slots >= 0) & (slots < case.main.num_slots)
    moved = torch.where(
        read, order[slots.clamp(0, case.main.num_slots - 1) // 16] * 16 + slots % 16, -1
    )
    case = replace(case, main=replace(case.main, data=grown),
                   selection=replace(case.selection, slots=moved.int()))  # fmt: skip
    assert same(run(case, device), before)


@pytest.mark.case("2 GiB byte offset")
def test_pages_beyond_2_gib(device):
    """Page number times page stride passes 2^31 at page 116,509."""
    case = random_case(heads=2, lengths=[40], window_lengths=[0], entries=320, width=40, spare=0)
    far = torch.tensor([0, 116507, 116508, 116509, 116599])
    pages = torch.empty(116600, 18432, dtype=torch.uint8, device=device)
    pages[far.to(device)] = case.main.data.to(device)
    slots = case.selection.slots
    slots = (far[slots.long() // 64] * 64 + slots % 64).int()
    moved = replace(case, main=replace(case.main, data=pages),
                    selection=selection(slots, case.selection.lengths))  # fmt: skip
    assert same(run(moved, device), run(case, device))


# ---- Arguments


@pytest.mark.case("Unsupported shapes")
@pytest.mark.parametrize("width", [192, 200, 256])
@pytest.mark.parametrize("heads", [16, 48])
def test_unusual_shapes(width, heads, device):
    case = random_case(heads=heads, lengths=[width, 3], window_lengths=[128, 0], width=width,
                       main=("MainFp4", 48), window=("WindowFp8", 48))  # fmt: skip
    assert_close(case, *run(case, device))


@pytest.mark.case("Unsupported shapes")
@pytest.mark.parametrize("heads", [17, 31, 48, 63])
@pytest.mark.parametrize("rows", [2, 9])
def test_heads_that_fill_no_vector(heads, rows, device):
    case = random_case(heads=heads, lengths=[70] * rows, window_lengths=[3] * rows)
    for dtype in (torch.float32, torch.bfloat16):
        assert_close(case, *run(case, device, dtype=dtype))


@pytest.mark.case("Unsupported shapes")
def test_rejected_shapes(device):
    case = random_case(heads=2)
    q = case.q
    narrow = selection(case.selection.slots, case.selection.lengths[:3].clone())
    index_pages = flash_csa.Pages.empty(4, "IndexFp4", 64)
    for change, message in (
        ({"q": q[..., :256].contiguous()}, "q must be"),
        ({"q": q.float()}, "q must be"),
        ({"selection": narrow}, "selection.lengths must be"),
        ({"main": index_pages}, "main"),
        ({"main": None}, "main"),
        ({"selection": None, "window": None, "main": None, "window_pages": None}, "one of"),
        ({"contiguous": (torch.zeros(1, 1).int(),) + (torch.zeros(4).int(),) * 2}, "together"),
    ):
        with pytest.raises(ValueError, match=message):
            run(replace(case, **change), device)


def test_window_list_comes_first(device):
    """One list of 50 records, or its first 20 as a window: the same tiles."""
    pages, slots = filled_pages("WindowFp8", 64, randn(50, 512))
    lists, lengths = lists_of(slots, [50], 50)
    whole = Case(q=randn(1, 2, 512, seed=1), main=pages, selection=selection(lists, lengths))
    first = flash_csa.Window(lists[:, :20].contiguous(), lengths - 30)
    rest = selection(lists[:, 20:].contiguous(), lengths - 20)
    cut = replace(whole, selection=rest, window_pages=pages, window=first)
    if device.type == "cpu":
        assert same(run(cut, device), run(whole, device))
    assert_close(whole, *run(cut, device))
