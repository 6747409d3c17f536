"""store, load, rope_store and quantize_query: bytes of records and where they lie."""

import numpy as np
import pytest
import torch

import flash_csa as fc
from flash_csa.reference import pages as ref_pages
from flash_csa.reference import quant
from flash_csa.reference.layout import RECORDS
from flash_csa.reference.rope import cos_sin_table, rotate
from golden import bf16
from golden import load as golden
from page_views import POISON, guarded_pages
from reference_data import sqrt_fp32

RECORD_NAMES = list(RECORDS)
PAGE_SIZES = (1, 2, 61, 64, 256)
EXTREME_SLOTS = (-1, -2, -(2**31), 2**31 - 1)


def values(n: int, dims: int) -> torch.Tensor:
    """bf16[n, dims] that reach every branch of the encoders: scales over many decades, outlier
    channels, exact ties, zeros of both signs, subnormals, saturation, NaN and Inf."""
    x = torch.randn(n, dims) * torch.exp2(torch.randint(-30, 12, (n, dims // 16)).float()).repeat(
        1, 16
    )
    x[:, ::37] *= 50
    x[1::9] = torch.randint(-12, 13, (dims,)) / 2
    x[2::9, dims // 2 :] = 0
    x[3::9, ::5] = -0.0
    x[4::9] *= 2.0**-120
    x[5::9] *= 2.0**20
    x[6::9, 7] = torch.nan
    x[7::9, 20] = -torch.inf
    return x.bfloat16()


def fill_pages(record: str, n: int, page_size: int = 64, device="cpu") -> fc.Pages:
    return guarded_pages(-(-n // page_size), record, page_size, device=device)[0]


def stored(x: torch.Tensor, record: str, device="cpu") -> quant.Quantized:
    """Bytes that the op writes for rows x, taken out of their page by the reference."""
    pages = fill_pages(record, len(x), device=device)
    slots = torch.arange(len(x), dtype=torch.int32)
    fc.store(x.to(device), pages, slots.to(device))
    return ref_pages.read_rows(pages.data.cpu(), slots, record, pages.page_size)


def assert_bytes(got: quant.Quantized, want: quant.Quantized) -> None:
    assert torch.equal(got.data, want.data)
    assert torch.equal(got.scales, want.scales)


def row(head: list[float], dims: int) -> torch.Tensor:
    x = torch.zeros(1, dims)
    x[0, : len(head)] = torch.tensor(head)
    return x.bfloat16()


def assert_codes(x: list[float], record: str, scale: str, codes: str, device="cpu") -> None:
    """First codes and first scale of a row that begins with x, in hexadecimal."""
    got = stored(row(x, RECORDS[record].dims), record, device)
    codes, scale = bytes.fromhex(codes), bytes.fromhex(scale)
    assert bytes(got.data[0, : len(codes)].tolist()) == codes
    assert bytes(got.scales[0, : len(scale)].tolist()) == scale


# ---- Record bytes


def test_records_are_those_of_the_reference():
    for name, ours in fc.RECORDS.items():
        theirs = RECORDS[name]
        assert (ours.bytes, ours.data_bytes, ours.dims, ours.group, ours.page_order) == (
            theirs.bytes,
            theirs.data_bytes,
            theirs.dims,
            theirs.group,
            theirs.page_order,
        )
        assert [ours.payload(p) for p in PAGE_SIZES] == [theirs.payload(p) for p in PAGE_SIZES]


@pytest.mark.case("Nibble order")
def test_packed_by_hand(device):
    e2m1 = [0.5, 1, 1.5, 2, 3, 4, 6, 0.0]
    assert_codes([*e2m1, *(-v for v in e2m1)], "MainFp4", "38", "21436507A9CBED8F", device)
    fp8 = [448, -448, 1, -1, 2**-9, -(2**-9), 0, -0.0]
    assert_codes(fp8, "WindowFp8", "7F69", "7EFE38B80181008000", device)
    assert_codes(fp8, "MixedFp8", "7F69696969696900", "7EFE38B80181008000", device)
    assert_codes([6, -6, 1, -0.5], "IndexFp4", "7F010101", "F79200", device)
    assert_codes([448, -448, 1, 2**-6], "IndexFp8", "0000803F", "7EFE380800", device)


def test_mixed_keeps_rope_dims(device):
    x = values(8, 512)
    got = stored(x, "MixedFp8", device)
    assert torch.equal(
        got.data[:, 448:].contiguous().view(torch.int16), x[:, 448:].view(torch.int16)
    )


@pytest.mark.case("E2M1 ties")
def test_ties_of_every_scale(device):
    ties = [6, 0.25, -0.25, 0.75, -0.75, 1.25, -1.25, 1.75, -1.75, 2.5, -2.5, 3.5, -3.5, 5, -5, 0]
    codes = torch.arange(1, 127)
    x = torch.zeros(128, 512)
    x[: len(codes), :16] = torch.tensor(ties) * quant.decode_e4m3(codes)[:, None]
    got = stored(x.bfloat16(), "MainFp4", device)
    want = torch.tensor(list(bytes.fromhex("07282A4A4C6C6E0E")), dtype=torch.uint8)
    assert torch.equal(got.scales[: len(codes), 0], codes.to(torch.uint8))
    assert torch.equal(got.data[: len(codes), :8], want.expand(len(codes), 8))


@pytest.mark.case("E4M3 scale below amax/6")
def test_scale_of_every_amax(device):
    amax = torch.arange(0, 0x454A, dtype=torch.int16).view(torch.bfloat16)  # 0 .. 3225
    assert len(amax) == 17738
    x = torch.zeros(len(amax), 512, dtype=torch.bfloat16)
    x[:, 0] = amax
    got = stored(x, "MainFp4", device)
    scale = (amax.float().clamp(min=6 * 2.0**-9) / 6).clamp(max=448)
    assert torch.equal(got.scales[:, 0], scale.to(torch.float8_e4m3fn).view(torch.uint8))
    above = amax.float() / quant.decode_e4m3(got.scales[:, 0]) > 6
    assert above.sum() == 1168
    assert (got.data[above, 0] == 7).all()
    for value, byte, decoded in ((6.375, 0x38, 6.0), (0.0174560546875, 0x01, 0.01171875)):
        i = int((amax.float() == value).nonzero())
        assert got.scales[i, 0] == byte
        assert quant.dequantize(got.data[i], got.scales[i], "MainFp4")[0] == decoded


@pytest.mark.case("Zero and tiny blocks")
def test_zero_and_tiny_groups(device):
    x = torch.zeros(5, 512)
    x[1] = -0.0
    x[2, 0], x[3, 0], x[4, 0] = 2.0**-133, 4.5 * 2.0**-9, 5.5 * 2.0**-9
    got = stored(x.bfloat16(), "MainFp4", device)
    assert (got.scales == 0x01).all()
    largest = quant.dequantize(*got, "MainFp4").amax(-1)
    assert largest.tolist() == [0, 0, 0, 0.0078125, 0.01171875]


@pytest.mark.case("Zero and tiny blocks")
@pytest.mark.parametrize("record", RECORD_NAMES)
def test_never_written_pages_decode_to_zero(record, device):
    pages = fc.Pages.empty(2, record, 16, device=device)
    slots = torch.arange(32, dtype=torch.int32, device=device)
    assert (fc.load(pages, slots, dtype=torch.float32) == 0).all()


@pytest.mark.parametrize("record", RECORD_NAMES)
def test_bytes_are_those_of_the_reference(record, device):
    x = values(300, RECORDS[record].dims)
    assert_bytes(stored(x, record, device), quant.quantize(x, record))


@pytest.mark.parametrize("record", RECORD_NAMES)
def test_every_bf16_value(record, device):
    """Values alone in their group, and beside a group maximum of 1."""
    r = RECORDS[record]
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[:: 8 if r.num_groups == 1 else 1]  # a row each: an eighth of them
    alone = torch.zeros(len(every) // r.num_groups + 1, r.num_groups, r.group, dtype=torch.bfloat16)
    alone.flatten(0, 1)[: len(every), 1] = every
    beside = alone.clone()
    beside[..., 0] = 1
    for groups in (alone, beside):
        x = torch.zeros(len(groups), r.dims, dtype=torch.bfloat16)
        x[:, : r.coded_dims] = groups.flatten(1)
        assert_bytes(stored(x, record, device), quant.quantize(x, record))


@pytest.mark.parametrize(
    "kind, record", [("main", "MainFp4"), ("index", "IndexFp4"), ("window", "WindowFp8")]
)
def test_golden_blocks(kind, record, device):
    data = golden("quant")
    x, want = bf16(data[f"{kind}_in"]), bf16(data[f"{kind}_dequant"])
    assert torch.equal(round_trip(x, record, device), want)


@pytest.mark.case("Real FP4 storage")
@pytest.mark.parametrize("file", ["csa2_short", "csa2_small"])
@pytest.mark.parametrize(
    "name, record",
    [
        ("L0.window", "WindowFp8"),
        ("L1.main", "MainFp4"),
        ("L3.main", "MainFp4"),
        ("L1.index_k", "IndexFp4"),
        ("L3.index_k", "IndexFp4"),
    ],
)
def test_golden_rows(file, name, record, device):
    data = golden(file)
    x, want = bf16(data[f"{name}_rotated"]), bf16(data[f"{name}_dequant"])
    assert torch.equal(round_trip(x, record, device), want)
    assert fc.Pages.empty(1, record, 64).data.nbytes == 64 * RECORDS[record].bytes


def round_trip(x: torch.Tensor, record: str, device, dtype=torch.bfloat16) -> torch.Tensor:
    pages = fill_pages(record, len(x), device=device)
    slots = torch.arange(len(x), dtype=torch.int32, device=device)
    fc.store(x.to(device), pages, slots)
    return fc.load(pages, slots, dtype=dtype).cpu()


@pytest.mark.parametrize("record", RECORD_NAMES)
def test_load_decodes_every_byte(record, device):
    """Random bytes, so also codes and scales that no encoder writes."""
    r = RECORDS[record]
    data = torch.randint(0, 256, (8, r.payload(32)), dtype=torch.uint8)
    if r.element == "E4M3":
        data[0, : r.data_bytes] = torch.arange(r.data_bytes) % 256
    slots = torch.arange(256, dtype=torch.int32)
    want = ref_pages.load(data, slots, record, 32)
    got = fc.load(fc.Pages(data.to(device), record, 32), slots.to(device), dtype=torch.float32)
    assert torch.equal(got.cpu().nan_to_num(nan=-77), want.nan_to_num(nan=-77))
    if r.scale_kind != "FP32":
        got = fc.load(fc.Pages(data.to(device), record, 32), slots.to(device))
        assert torch.equal(got.cpu().nan_to_num(nan=-77), want.bfloat16().nan_to_num(nan=-77))


@pytest.mark.parametrize("record", RECORD_NAMES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_bad_values_stay_in_their_group(record, bad, device):
    r = RECORDS[record]
    clean = torch.randn(4, r.dims).bfloat16()
    x = clean.clone()
    x[1, r.group // 2] = bad
    got = quant.dequantize(*stored(x, record, device), record)
    want = quant.dequantize(*quant.quantize(clean, record), record)
    want[1, : r.group] = torch.nan
    assert torch.equal(got.nan_to_num(nan=-77), want.nan_to_num(nan=-77))


# ---- Pages and slots


@pytest.mark.case("Padded page stride")
@pytest.mark.parametrize("record", RECORD_NAMES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_geometry(record, page_size, device):
    """Same bytes at the same slots for every page stride and offset, and not one byte besides."""
    num_pages = 3 if page_size > 1 else 40
    capacity = num_pages * page_size
    slots = torch.randperm(capacity)[: min(capacity // 2 + 1, 60)].to(torch.int32)
    x = values(len(slots), RECORDS[record].dims)
    rows = quant.quantize(x, record)
    decoded = quant.dequantize(*rows, record).nan_to_num(nan=-77)
    payload = RECORDS[record].payload(page_size)
    for padding in (0, 576, 4096, payload):
        pages, buffer = guarded_pages(
            num_pages, record, page_size, padding=padding, offset=512, device=device
        )
        want_pages, want = guarded_pages(num_pages, record, page_size, padding=padding, offset=512)
        ref_pages.write_rows(rows, want_pages.data, slots, record, page_size)
        fc.store(x.to(device), pages, slots.to(device))
        assert torch.equal(buffer.cpu(), want)
        got = fc.load(pages, slots.to(device), dtype=torch.float32)
        assert torch.equal(got.cpu().nan_to_num(nan=-77), decoded)


@pytest.mark.parametrize("record", RECORD_NAMES)
def test_absent_slots(record, device):
    """Slots outside [0, capacity) write nothing and read as zeros."""
    pages, buffer = guarded_pages(2, record, 61, device=device)
    slots = torch.tensor([*EXTREME_SLOTS, 122, 123, 2**24], dtype=torch.int32, device=device)
    fc.store(values(len(slots), RECORDS[record].dims).to(device), pages, slots)
    assert (buffer == POISON).all()
    assert (fc.load(pages, slots, dtype=torch.float32) == 0).all()


def test_nothing_to_do(device):
    pages = fc.Pages(torch.empty(0, 288 * 64, dtype=torch.uint8, device=device), "MainFp4", 64)
    none = torch.empty(0, dtype=torch.int32, device=device)
    fc.store(torch.empty(0, 512, dtype=torch.bfloat16, device=device), pages, none)
    slots = torch.zeros(3, dtype=torch.int32, device=device)
    fc.store(values(3, 512).to(device), pages, slots)  # no page is large enough for slot 0
    assert (fc.load(pages, slots) == 0).all()


@pytest.mark.parametrize("record", RECORD_NAMES)
def test_strided_rows(record, device):
    dims = RECORDS[record].dims
    wide = values(40, 2 * dims).to(device)
    assert_bytes(
        stored(wide[:, dims:], record, device), stored(wide[:, dims:].clone(), record, device)
    )
    pages = fill_pages(record, 40, device=device)
    slots = torch.arange(40, dtype=torch.int32, device=device)
    fc.store(wide[:, :dims], pages, slots)
    out = torch.full((40, 2 * dims), 7.0, device=device)
    fc.load(pages, slots, out=out[:, dims:])
    want = fc.load(pages, slots, dtype=torch.float32)
    assert torch.equal(out[:, dims:].nan_to_num(nan=-77), want.nan_to_num(nan=-77))
    assert (out[:, :dims] == 7).all()


@pytest.mark.case("2 GiB byte offset")
@pytest.mark.parametrize(
    "num_pages, page_bytes, stride, record, page_size, page_ids",
    [
        (116600, 18432, 18432, "MainFp4", 64, (0, 116507, 116508, 116509, 116599)),
        (246800, 8704, 8704, "IndexFp4", 128, (0, 246723, 246724, 246725, 246799)),
        (127200, 16896, 16896, "WindowFp8", 32, (0, 127099, 127100, 127101, 127199)),
        (2240, 18432, 1435968, "MainFp4", 64, (0, 1495, 1496, 2000, 2239)),
    ],
)
def test_offsets_beyond_2_gib(num_pages, page_bytes, stride, record, page_size, page_ids, device):
    """On the CPU only the pages that the test touches are backed by memory."""
    if device.type == "cpu":
        buffer = torch.from_numpy(np.zeros(num_pages * stride, np.uint8))
    else:
        buffer = torch.zeros(num_pages * stride, dtype=torch.uint8, device=device)
    data = buffer.as_strided((num_pages, page_bytes), (stride, 1))
    slots = torch.tensor([page * page_size + o for page in page_ids for o in (0, page_size - 1)])
    x = torch.randn(len(slots), RECORDS[record].dims).bfloat16()
    pages = fc.Pages(data, record, page_size)
    fc.store(x.to(device), pages, slots.to(torch.int32).to(device))
    got = fc.load(pages, slots.to(torch.int32).to(device), dtype=torch.float32).cpu()
    assert torch.equal(got, quant.quantize_dequantize(x, record))
    for page in page_ids[1:]:  # where a 31- or 32-bit offset would have ended up
        for bits in (31, 32):
            wrapped = page * stride % 2**bits
            if all(abs(wrapped - other * stride) >= page_bytes for other in page_ids):
                assert not buffer[wrapped : wrapped + page_bytes].any()


@pytest.mark.case("One writer per byte")
def test_repeats_are_identical(device):
    x, q = values(1024, 512).to(device), torch.zeros(1024, 1, 512).bfloat16().to(device)
    slots = torch.randperm(4 * 256).to(torch.int32).to(device)
    positions = torch.arange(1024, dtype=torch.int32, device=device)
    table = cos_sin_table(1024, 160000, True).to(device)
    first = None
    for _ in range(100):
        pages, buffer = guarded_pages(4, "WindowFp8", 256, device=device)
        fc.rope_store(q, x, pages, slots, positions, table)
        first = buffer if first is None else first
        assert torch.equal(buffer, first)


@pytest.mark.parametrize("record", RECORD_NAMES)
def test_levels_and_threads(record, cpu_level):
    """Every instruction level and any number of threads: the reference's bytes."""
    x = values(130, RECORDS[record].dims)
    want = quant.quantize(x, record)
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        assert_bytes(stored(x, record), want)
        got = round_trip(x, record, "cpu", torch.float32)
        decoded = quant.dequantize(*want, record)
        assert torch.equal(got.nan_to_num(nan=-77), decoded.nan_to_num(nan=-77))
    torch.set_num_threads(before)


# ---- rope_store


def rms_fp32(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) as the numerics contract orders it: squares of BF16 values are
    exact, so 32 strided partial sums and a halving tree need no fused operation."""
    squares = x.float().square().unflatten(-1, (-1, 32))
    lanes = torch.zeros_like(squares[..., 0, :])
    for i in range(squares.shape[-2]):
        lanes = lanes + squares[..., i, :]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return (x.float() * (1 / sqrt_fp32(lanes / x.shape[-1] + eps))).bfloat16()


def rope_case(rows: int, heads: int, max_pos: int = 4096):
    q = torch.randn(rows, heads, 512).bfloat16()
    kv = values(rows, 512)
    positions = torch.randint(0, max_pos, (rows,), dtype=torch.int32)
    slots = torch.randperm(rows + 5)[:rows].to(torch.int32)
    return q, kv, positions, slots, cos_sin_table(max_pos, 160000, True)


@pytest.mark.parametrize("record", ["WindowFp8", "MixedFp8"])
@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("rows, heads", [(1, 1), (7, 3), (70, 8), (3, 24), (2, 130)])
def test_rope_store(record, eps, rows, heads, device):
    q, kv, positions, slots, table = rope_case(rows, heads)
    pages, buffer = guarded_pages(rows + 5, record, 1, device=device)
    want_pages, want = guarded_pages(rows + 5, record, 1)
    ref_pages.store(rotate(kv, positions, table), want_pages.data, slots, record, 1)
    want_q = rotate(q if eps is None else rms_fp32(q, eps), positions, table)
    got = q.to(device)
    fc.rope_store(
        got,
        kv.to(device),
        pages,
        slots.to(device),
        positions.to(device),
        table.to(device),
        q_norm_eps=eps,
    )
    assert torch.equal(got.cpu().view(torch.int16), want_q.view(torch.int16))
    assert torch.equal(buffer.cpu(), want)


@pytest.mark.case("RoPE of entries and inverse rotation")
@pytest.mark.parametrize("layers", ["compressed", "window"])
def test_golden_rotation(layers, device):
    data = golden("rope")
    positions = torch.from_numpy(data["positions"])
    angle = torch.from_numpy(data[f"angles_{layers}"]).double()
    table = torch.cat([angle.cos(), angle.sin()], dim=-1).float()
    x, want = bf16(data[f"x_{layers}"]), bf16(data[f"rotated_{layers}"])
    got = x[:, None].clone().to(device)
    pages = fill_pages("WindowFp8", len(x), device=device)
    rows = torch.arange(len(positions), dtype=torch.int32, device=device)
    fc.rope_store(got, x.to(device), pages, rows, rows, table.to(device))
    assert torch.equal(got[:, 0].cpu(), want)
    assert torch.equal(
        fc.load(pages, rows, dtype=torch.float32).cpu(),
        quant.quantize_dequantize(want, "WindowFp8"),
    )


def test_only_rotated_dims_of_q_move(device):
    """NaN payloads in the other dims keep their bits; heads may be slices of a wider tensor."""
    wide = torch.randn(9, 6, 512).bfloat16()
    wide[..., 3] = torch.tensor([0x7FA5], dtype=torch.int16).view(torch.bfloat16)
    want = wide.clone()
    _, kv, positions, _, table = rope_case(9, 1)
    want[:, 2:5] = rotate(wide[:, 2:5], positions, table)
    got = wide.to(device)
    none = torch.full((9,), -1, dtype=torch.int32, device=device)
    pages, buffer = guarded_pages(1, "WindowFp8", 16, device=device)
    fc.rope_store(got[:, 2:5], kv.to(device), pages, none, positions.to(device), table.to(device))
    assert torch.equal(got.cpu().view(torch.int16), want.view(torch.int16))
    assert (buffer == POISON).all()  # slot -1 skips only the store


@pytest.mark.case("Padded query rows")
@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("far", [False, True])
def test_padded_rows_are_left_alone(far, eps, device):
    """Position -1, or one without a row in the table: neither q nor a page changes."""
    q, kv, positions, slots, table = rope_case(12, 2)
    padded = torch.tensor([3, 4, 9, 11])
    beyond = [2**31 - 1, -(2**31)] if far else [-1, len(table)]
    positions[padded] = torch.tensor([-1, len(table), *beyond], dtype=torch.int32)
    around = torch.ones(len(table) + 2, 64, device=device)  # a row in front and one behind
    around[1:-1] = table
    kv[padded] = torch.nan
    q[padded] = torch.nan
    pages, buffer = guarded_pages(17, "WindowFp8", 1, device=device)
    want_pages, want = guarded_pages(17, "WindowFp8", 1)
    keep = torch.ones(12, dtype=torch.bool).index_fill(0, padded, False)
    rotated = rotate(kv[keep], positions[keep], table)
    ref_pages.store(rotated, want_pages.data, slots[keep], "WindowFp8", 1)
    got = q.to(device)
    fc.rope_store(
        got,
        kv.to(device),
        pages,
        slots.to(device),
        positions.to(device),
        around[1:-1],
        q_norm_eps=eps,
    )
    assert torch.equal(buffer.cpu(), want)
    assert torch.equal(got.cpu()[padded].view(torch.int16), q[padded].view(torch.int16))


@pytest.mark.parametrize("eps", [None, 1e-6])
def test_rope_store_levels(eps, cpu_level):
    test_rope_store("WindowFp8", eps, 70, 8, torch.device("cpu"))


# ---- quantize_query


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """H x / sqrt(128) in FP64; sums of 128 BF16 values of similar size need no more than FP32."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < 128:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return x.double() @ h


def query_case(rows: int, heads: int):
    q = torch.randn(rows, heads, 128).bfloat16()
    positions = torch.randint(0, 4096, (rows,), dtype=torch.int32)
    return q, positions, cos_sin_table(4096, 160000, True)


def expected_query(x: torch.Tensor, record: str) -> fc.IndexQuery:
    data, scales = quant.quantize(x, record)
    dtype = torch.int32 if record == "IndexFp4" else torch.float32
    return fc.IndexQuery(data, scales.view(dtype).squeeze(-1))


def assert_query(got: fc.IndexQuery, want: fc.IndexQuery) -> None:
    assert torch.equal(got.codes.cpu(), want.codes)
    assert torch.equal(got.scales.cpu().view(torch.int32), want.scales.view(torch.int32))


@pytest.mark.parametrize("record", ["IndexFp4", "IndexFp8"])
@pytest.mark.parametrize("rows, heads", [(1, 32), (5, 64), (66, 3)])
def test_quantize_query(record, rows, heads, device):
    q, positions, table = query_case(rows, heads)
    q[0, 0] = torch.nan
    got = fc.quantize_query(q.to(device), positions.to(device), table.to(device), record=record)
    assert_query(got, expected_query(rotate(q, positions, table), record))


@pytest.mark.case("Flags take effect")
@pytest.mark.parametrize("record", ["IndexFp4", "IndexFp8"])
def test_hadamard_rotation(record, device):
    """Values on a coarse grid, for which every order of summation gives the same FP32 sums."""
    q, positions, table = query_case(40, 16)
    q = ((q * 8).round() / 8).bfloat16()
    positions[:] = 0
    sums = hadamard(q).float()
    assert torch.equal(sums.double(), hadamard(q))
    want = expected_query((sums * 128**-0.5).bfloat16(), record)
    args = (q.to(device), positions.to(device), table.to(device))
    assert_query(fc.quantize_query(*args, record=record, rotate=True), want)
    assert not torch.equal(fc.quantize_query(*args, record=record).codes.cpu(), want.codes)
    with pytest.raises(TypeError):
        fc.quantize_query(*args, hadamard=True)


def test_hadamard_comes_after_rope_and_both_round(device):
    q, positions, table = query_case(64, 16)
    got = fc.quantize_query(q.to(device), positions.to(device), table.to(device), rotate=True)
    rotated = hadamard(rotate(q, positions, table)) * 128**-0.5
    want = expected_query(rotated.float().bfloat16(), "IndexFp4")
    differs = got.codes.cpu() != want.codes
    assert differs.float().mean() < 1e-3  # FP32 against FP64 sums
    before = expected_query(
        rotate((hadamard(q) * 128**-0.5).float().bfloat16(), positions, table), "IndexFp4"
    )
    assert (got.codes.cpu() != before.codes).float().mean() > 0.1


@pytest.mark.parametrize("file", ["csa2_short", "csa2_small"])
@pytest.mark.parametrize("layer", ["L1", "L3", "L4"])
def test_golden_queries(file, layer, device):
    """Golden queries are rotated already: position 0 leaves them as they are."""
    data = golden(file)
    q, want = bf16(data[f"{layer}.index_q_rotated"]), bf16(data[f"{layer}.index_q_dequant"])
    positions = torch.zeros(len(q), dtype=torch.int32, device=device)
    table = cos_sin_table(1, 160000, True).to(device)
    got = fc.quantize_query(q.to(device), positions, table)
    scales = got.scales.cpu().unsqueeze(-1).view(torch.uint8)
    assert torch.equal(quant.dequantize(got.codes.cpu(), scales, "IndexFp4"), want.float())


def test_padded_queries_and_strided_outputs(device):
    q, positions, table = query_case(10, 8)
    positions[4], positions[7] = -1, len(table)
    q[4], q[7] = torch.nan, torch.nan
    want = expected_query(rotate(q, positions.clamp(0, len(table) - 1), table), "IndexFp4")
    want.codes[[4, 7]] = 0
    want.scales[[4, 7]] = 0
    codes = torch.full((10, 9, 64), POISON, dtype=torch.uint8, device=device)
    scales = torch.full((10, 12), -5, dtype=torch.int32, device=device)
    out = fc.IndexQuery(codes[:, :8], scales[:, :8])
    wide = torch.zeros(10, 16, 128, dtype=torch.bfloat16, device=device)
    wide[:, 8:] = q.to(device)
    fc.quantize_query(wide[:, 8:], positions.to(device), table.to(device), out=out)
    assert_query(out, want)
    assert (codes[:, 8] == POISON).all() and (scales[:, 8:] == -5).all()


@pytest.mark.parametrize("rotate_flag", [False, True])
@pytest.mark.parametrize("record", ["IndexFp4", "IndexFp8"])
def test_query_levels(record, rotate_flag, cpu_level):
    """Baseline's bytes at every level."""
    q, positions, table = query_case(33, 8)
    got = fc.quantize_query(q, positions, table, record=record, rotate=rotate_flag)
    fc._C.set_cpu_level("baseline")
    want = fc.quantize_query(q, positions, table, record=record, rotate=rotate_flag)
    assert_query(got, want)
