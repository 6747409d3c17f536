"""CUDA gives the CPU bits: records, tails, scores, selections, pools, slots, schedules.

Random batches at real geometry; attention and scores of FP8 keys within the bounds of FP32. Run
with --device=cuda.
"""

import pytest
import torch

import flash_csa
from flash_csa import RECORDS, Batch
from flash_csa.reference import pages as ref_pages
from op_calls import CALLS, Call, Scene

pytestmark = pytest.mark.usefixtures("_needs_cuda")


@pytest.fixture
def _needs_cuda(device):
    if device.type != "cuda":
        pytest.skip("compares CUDA with the CPU: --device=cuda")


BOUNDED = {"attend": 2e-2, "merge": 2e-2}  # of the largest output: BF16 outputs, one rounding apart
FP8_SCORES = 1e-5  # of the largest score: FP32 sums in another order


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.int32:
        tensor.fill_(-7)


def _same(name: str, cpu: torch.Tensor, cuda: torch.Tensor, bound: float | None) -> None:
    got = cuda.cpu()
    if bound is not None and cpu.is_floating_point():
        a, b = cpu.double(), got.double()
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf()), name
        finite = a.isfinite()
        scale = a[finite].abs().max() if finite.any() else torch.tensor(1.0)
        worst = (a - b)[finite].abs().max() if finite.any() else torch.tensor(0.0)
        assert worst <= 1e-6 + bound * scale, f"{name}: {worst} of {scale}"
        return
    a, b = cpu.contiguous().view(torch.uint8), got.contiguous().view(torch.uint8)
    differ = int((a != b).sum())
    assert differ == 0, f"{name}: {differ} of {a.numel()} bytes differ"


def _assert_keys_close(cpu: torch.Tensor, cuda: torch.Tensor, page_size: int) -> None:
    """IndexFp4 pages of projected keys, whose sums have another order: at most 0.05 % of the scale
    bytes differ, by one exponent, and outside those groups 0.5 % of the codes, by one step."""
    slots = torch.arange(len(cpu) * page_size)
    want, got = (ref_pages.read_rows(x, slots, "IndexFp4", page_size) for x in (cpu, cuda.cpu()))
    apart = (want.scales.int() - got.scales.int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).sum() <= max(1, 0.0005 * apart.numel())
    codes = [torch.stack([x.data & 15, x.data >> 4], -1).flatten(1).int() for x in (want, got)]
    values = [torch.where(c < 8, c, 8 - c) for c in codes]
    steps = (values[0] - values[1]).abs().where((apart == 0).repeat_interleave(32, 1), 0)
    assert steps.max() <= 1
    assert (steps > 0).sum() <= max(1, 0.005 * steps.numel())


def _compare(call: Call, device, *, poison: tuple[str, ...] = ()) -> None:
    """Runs a call on both back ends from the same inputs and compares all that it may write."""
    here, there = call.to("cpu"), call.to(device)
    here = here.but(**{n: t.clone() for n, t in here.mutated().items()})
    for run in (here, there):
        for name in poison:
            _poison(run.args[name])
        run()
    bound = BOUNDED.get(call.op)
    if bound is not None and here.args["out"].dtype == torch.float32:
        bound = 1e-5
    if call.op == "index_scores" and here.args["query_scales"].dtype == torch.float32:
        bound = FP8_SCORES
    for name, tensor in here.mutated().items():
        if name == "index_pages" and here.args.get("key_weight") is not None:
            _assert_keys_close(tensor, there.args[name], here.args["index_page_size"])
        elif name != "workspace":
            _same(f"{call.op}.{name}", tensor, there.args[name], bound)
    if "workspace" in there.mutated():
        assert not there.args["workspace"][: flash_csa.SYNC_BYTES].any(), "counters left behind"


@pytest.mark.parametrize("name", [name for name in CALLS if name != "probe"])
def test_every_call_of_the_table(name, device):
    _compare(CALLS[name](Scene("cpu")), device)


def _random_bytes(*size: int) -> torch.Tensor:
    return torch.randint(0, 256, size, dtype=torch.uint8)


def _rows(count: int, dims: int) -> torch.Tensor:
    """BF16 rows over all magnitudes, with zeros, infinities and NaN here and there."""
    x = torch.randn(count, dims) * torch.exp2(
        torch.randint(-30, 20, (count, dims // 16)).float()
    ).repeat_interleave(16, 1)
    x[torch.rand(count, dims) < 0.01] = 0.0
    x[::37, 5] = float("inf")
    x[::41, 7] = float("nan")
    return x.bfloat16()


@pytest.mark.case("CPU equals GPU")
@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("page_size", [1, 61, 64])
def test_store_and_load(record, page_size, device):
    r, count = RECORDS[record], 20_000
    pages = flash_csa.Pages.empty(-(-count // page_size) + 1, record, page_size)
    slots = torch.randperm(pages.num_slots)[:count].int()
    slots[::11] = -1
    slots[5], slots[7] = pages.num_slots, 2**31 - 1
    pages.data.copy_(_random_bytes(*pages.data.shape))
    args = {"pages": pages.data, "pages_record": r.id, "pages_page_size": page_size}
    _compare(Call("store", {"rows": _rows(count, r.dims), **args, "slots": slots}), device)
    out = torch.empty(count, r.dims)
    load = Call("load", {**args, "slots": slots, "out": out})
    _compare(load, device, poison=("out",))
    if record != "IndexFp8":
        _compare(load.but(out=out.bfloat16()), device, poison=("out",))


@pytest.mark.case("CPU equals GPU")
def test_every_bf16_value_in_every_record(device):
    values = torch.arange(65536, dtype=torch.int32).short().view(torch.bfloat16)
    for record in RECORDS.values():
        rows = values.repeat_interleave(record.group)[
            : 65536 * record.group // record.dims * record.dims
        ]
        rows = rows.view(-1, record.dims).contiguous()
        pages = flash_csa.Pages.empty(-(-len(rows) // 64), record.name, 64)
        slots = torch.arange(len(rows), dtype=torch.int32)
        _compare(
            Call(
                "store",
                {
                    "rows": rows,
                    "pages": pages.data,
                    "pages_record": record.id,
                    "pages_page_size": 64,
                    "slots": slots,
                },
            ),
            device,
        )


def _batch(requests: list[tuple[int, int]], padding: int = 3) -> Batch:
    starts, rows = zip(*requests, strict=True)
    return Batch.build(
        starts, rows, owned=[n + 1 for n in rows], num_rows=sum(rows) + len(rows) + padding
    )


def _batch_args(batch: Batch) -> dict:
    names = ("positions", "row_request", "cu_tokens", "start", "tail_slot", "max_rows")
    return {f"batch_{n}": v for n, v in zip(names, batch.flat(), strict=True)}


REQUESTS = {
    "decode": [(n, 1) for n in (0, 1, 2, 3, 126, 127, 128, 129, 509, 1023, 1024)],
    "prefill": [(0, 1000), (1000, 333), (7, 1), (0, 129)],
    "mixed": [(500, 8), (0, 1), (0, 0), (255, 2), (384, 127)],
}


def _spoil(kv: torch.Tensor, gate: torch.Tensor | None) -> None:
    """Values that are rare: NaN, infinities, zeros, gates that differ by more than exp can say."""
    for row, value in ((97, torch.nan), (89, torch.inf), (83, 0.0), (79, 1e-40), (73, 3e38)):
        kv[row::101, 5:40:7] = value
    if gate is not None:
        for row, value in ((11, torch.nan), (23, torch.inf), (37, -torch.inf), (53, 150.0)):
            gate[row::103, 3:90:11] = value


LONG = {"long": [(0, 1500), (501, 433), (2, 1), (0, 0), (63, 131)]}  # compressed in tiles


@pytest.mark.parametrize("requests", [*REQUESTS, *LONG])
@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
@pytest.mark.parametrize("width", [512, 128])
def test_compress(requests, ratio, width, device):
    if ratio == 1 and width == 128:
        pytest.skip("ratio 1 has no index compressor")
    batch = _batch((REQUESTS | LONG)[requests])
    rows, entries = batch.num_rows, 2048
    columns = 2 * width if ratio == 4 else width
    table = torch.randperm(batch.num_requests * 32).int().view(batch.num_requests, 32)
    ring = torch.arange(batch.num_requests * 32, dtype=torch.int32).view(batch.num_requests, 32)
    step = flash_csa.step_slots(
        batch, [table], ring, ratios=[ratio], page_sizes=[64], window_page_size=64
    )
    full = width == 512
    args = {
        "kv": torch.randn(rows, columns).bfloat16()
        if ratio == 1
        else 3 * torch.randn(rows, columns),
        **_batch_args(batch),
        "entry_slots": step.entry_slots[0].clone(),
        "ratio": ratio,
        "norm_weight": 1 + 0.1 * torch.randn(width),
        "eps": 1e-6,
        "cos_sin": flash_csa.cos_sin_table(entries, 160000.0, yarn=True),
        "latent_out": torch.zeros(rows, width).bfloat16(),
        "rotate": not full,
    }
    if ratio > 1:
        args["gate"] = 3 * torch.randn(rows, columns)
        args["tail_rows"] = torch.randn(batch.num_requests, 2, 2 * ratio + 3, columns)
    if ratio >= 4:
        args["bias"] = torch.randn(ratio, columns)
    _spoil(args["kv"], args.get("gate"))
    if full:
        main = flash_csa.Pages.empty(table.numel(), "MainFp4" if ratio < 4 else "MixedFp8", 64)
        args |= {
            "main_pages": main.data,
            "main_record": RECORDS[main.record].id,
            "main_page_size": 64,
        }
        args |= {
            "key_weight": (torch.randn(128, 512) / 22).bfloat16(),
            "key_norm_weight": torch.ones(128),
        }
    index = flash_csa.Pages.empty(table.numel(), "IndexFp4", 64)
    args |= {
        "index_pages": index.data,
        "index_record": RECORDS["IndexFp4"].id,
        "index_page_size": 64,
    }
    _compare(Call("compress", args), device)


@pytest.mark.parametrize("record", ["WindowFp8", "MixedFp8"])
@pytest.mark.parametrize("q_norm_eps", [None, 1e-6])
def test_rope_store(record, q_norm_eps, device):
    rows, heads = 777, 5
    pages = flash_csa.Pages.empty(20, record, 64)
    positions = torch.randint(-1, 4096, (rows,)).int()
    args = {
        "q": torch.randn(rows, 2 * heads, 512).bfloat16()[:, heads:],
        "kv": torch.randn(rows, 512).bfloat16(),
        "window_pages": pages.data,
        "window_record": RECORDS[record].id,
        "window_page_size": 64,
        "slots": torch.randperm(pages.num_slots)[:rows].int(),
        "positions": positions,
        "cos_sin": flash_csa.cos_sin_table(4000, 10000.0, yarn=False),
        "q_norm_eps": q_norm_eps,
    }
    _compare(Call("rope_store", args), device)


@pytest.mark.parametrize("record", ["IndexFp4", "IndexFp8"])
@pytest.mark.parametrize("rotate", [False, True])
def test_quantize_query(record, rotate, device):
    rows, heads = 333, 64
    out = flash_csa.IndexQuery.empty(rows, heads, record)
    args = {
        "q": _rows(rows * heads, 128).view(rows, heads, 128),
        "positions": torch.randint(-1, 4096, (rows,)).int(),
        "cos_sin": flash_csa.cos_sin_table(4000, 160000.0, yarn=True),
        "record": RECORDS[record].id,
        "rotate": rotate,
        "out_codes": out.codes,
        "out_scales": out.scales,
    }
    _compare(Call("quantize_query", args), device)


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
def test_step(requests, strict, invariant, device):
    batch = _batch(REQUESTS[requests])
    count = batch.num_requests
    tables = [torch.randint(-1, 500, (count, n)).int() for n in (40, 20, 9)]
    ring = torch.randint(-1, 500, (count, 20)).int()
    sizes = {"ratios": [1, 2, 128], "page_sizes": [64, 61, 8]}
    out = flash_csa.StepSlots.empty(batch.num_rows, 3)
    first = torch.randint(0, 300, (count,)).int()
    slots = Call(
        "step_slots",
        {
            **_batch_args(batch),
            "block_tables": tables,
            "window_table": ring,
            **sizes,
            "window_page_size": 64,
            "strict": strict,
            "window_first": first,
            "entry_first": torch.randint(0, 50, (3, count)).int(),
            "window_store": out.window_store,
            "lists_slots": out.lists.slots,
            "lists_lengths": out.lists.lengths,
            "entry_slots": out.entry_slots,
            "n_vis": out.n_vis,
        },
    )
    _compare(slots, device)
    size = flash_csa.schedule_size(num_sms=132, max_rows_total=batch.num_rows)
    _compare(
        Call(
            "schedule",
            {
                **_batch_args(batch),
                "ratios": [1, 2, 128],
                "max_entries": [2560, 1220, 72],
                "k": 512,
                "heads": 64,
                "index_heads": 32,
                "window_first": first,
                "pool_blocks": 64,
                "pool_ratio": 1,
                "contiguous_ratios": [128],
                "strict": strict,
                "batch_invariant": invariant,
                "num_sms": 132,
                "out": torch.full((13, size), -1, dtype=torch.int32),
            },
        ),
        device,
    )


@pytest.mark.parametrize("heads", [1, 8, 48, 64, 128])
@pytest.mark.parametrize("records", [("WindowFp8", "MainFp4"), ("MixedFp8", "MixedFp8")])
@pytest.mark.parametrize("f32", [False, True])
def test_attend(heads, records, f32, device):
    rows, page_size = 9, 61
    pages = [flash_csa.Pages.empty(60, record, page_size) for record in records]
    for p in pages:
        slots = torch.arange(p.num_slots, dtype=torch.int32)
        flash_csa.store(torch.randn(p.num_slots, 512).bfloat16(), p, slots)

    def lists(width):
        slots = torch.randint(-1, 60 * page_size + 5, (rows, width)).int()
        lengths = torch.randint(0, width + 1, (rows,)).int()
        lengths[0], lengths[1] = 0, width
        return slots, lengths

    window, selection = lists(128), lists(512)
    batch = Batch.build([600] * rows, [1] * rows)
    work = flash_csa.schedule(
        batch, ratios=[1], max_entries=[3660], k=512, heads=heads, index_heads=32, num_sms=132
    )
    args = {
        "q": torch.randn(rows, heads, 512).bfloat16(),
        "main_pages": pages[1].data,
        "main_record": RECORDS[records[1]].id,
        "main_page_size": page_size,
        "selection_slots": selection[0],
        "selection_lengths": selection[1],
        "window_pages": pages[0].data,
        "window_record": RECORDS[records[0]].id,
        "window_page_size": page_size,
        "window_slots": window[0],
        "window_lengths": window[1],
        "sink": torch.randn(heads),
        "schedule": work[3],
        "workspace": flash_csa.workspace("attend", heads=heads, num_sms=132),
        "out": torch.empty(rows, heads, 512, dtype=torch.float32 if f32 else torch.bfloat16),
        "lse": torch.empty(rows, heads),
    }
    if not f32:
        args |= {
            "derotate_positions": batch.positions,
            "derotate_cos_sin": flash_csa.cos_sin_table(1024, 160000.0, yarn=True),
        }
    _compare(Call("attend", args), device, poison=("out", "lse"))


def _index_scene(heads: int, requests: str, record: str = "IndexFp4"):
    batch = _batch(REQUESTS[requests])
    count, page_size = batch.num_requests, 64
    table = torch.randperm(count * 24).int().view(count, 24)
    table[:, 7] = -1
    index = flash_csa.Pages.empty(table.numel(), record, page_size)
    slots = torch.arange(index.num_slots, dtype=torch.int32)
    flash_csa.store(_rows(index.num_slots, 128).nan_to_num(1, 1, 1), index, slots)
    query = flash_csa.quantize_query(
        torch.randn(batch.num_rows, heads, 128).bfloat16(),
        batch.positions.clamp(min=0),
        flash_csa.cos_sin_table(2048, 160000.0, yarn=True),
        record=record,
    )
    work = flash_csa.schedule(
        batch,
        ratios=[1],
        max_entries=[24 * 64],
        k=512,
        heads=64,
        index_heads=heads,
        pool_blocks=64,
        pool_ratio=1,
        num_sms=132,
    )
    args = {
        "query_codes": query.codes,
        "query_scales": query.scales,
        "index_pages": index.data,
        "index_record": RECORDS[record].id,
        "index_page_size": page_size,
        "weights": torch.randn(batch.num_rows, heads),
        **_batch_args(batch),
        "block_table": table,
        "schedule": work[1],
        "ratio": 1,
    }
    return batch, args


@pytest.mark.parametrize("heads", [8, 32, 64])
@pytest.mark.parametrize("requests", REQUESTS)
def test_index_scores(heads, requests, device):
    batch, args = _index_scene(heads, requests)
    args["out"] = torch.zeros(batch.num_rows, 24 * 64)
    args["workspace"] = flash_csa.workspace("index_scores")
    _compare(Call("index_scores", args), device)
    args["weights"] = args["weights"].bfloat16()
    _compare(Call("index_scores", args), device)


@pytest.mark.parametrize("k", [1, 64, 512, 2048])
@pytest.mark.parametrize("requests", REQUESTS)
def test_index_select_and_pools(k, requests, device):
    batch, args = _index_scene(32, requests)
    rows, width = batch.num_rows, 64
    out = flash_csa.Selection.empty(rows, k, scores=True)
    pool = flash_csa.Pool.empty(rows, width, scores=True)
    space = flash_csa.workspace(
        "index_select", max_rows=rows, k=k, max_entries=24 * 64, pool_blocks=width, num_sms=132
    )
    outs = {
        "out_positions": out.positions,
        "out_slots": out.slots,
        "out_lengths": out.lengths,
        "out_scores": out.scores,
        "workspace": space,
    }
    build = {
        "pool_out_blocks": pool.blocks,
        "pool_out_counts": pool.counts,
        "pool_out_scores": pool.scores,
    }
    poison = (*outs, *build)
    poison = tuple(n for n in poison if n != "workspace")
    call = Call("index_select", {**args, "k": k, **outs, **build})
    _compare(call, device, poison=poison)
    call()
    inside = {"pool_blocks": pool.blocks, "pool_counts": pool.counts}
    _compare(Call("index_select", {**args, "k": k, **outs, **inside}), device, poison=poison[:4])


@pytest.mark.parametrize("kind", ["normal", "ties", "ramp", "close", "special"])
@pytest.mark.parametrize("columns", [64, 4096, 200_000])
def test_select(kind, columns, device):
    rows, k = 4, 512
    scores = {
        "normal": lambda: torch.randn(rows, columns),
        "ties": lambda: torch.randint(0, 3, (rows, columns)).float(),
        "ramp": lambda: torch.arange(columns).float().repeat(rows, 1),
        "close": lambda: 1 + torch.rand(rows, columns) * 2**-12,
        "special": lambda: torch.randn(rows, columns).where(
            torch.rand(rows, columns) < 0.5,
            torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])[
                torch.randint(0, 5, (rows, columns))
            ],
        ),
    }[kind]()
    page_size = 64
    starts = [columns - 1, columns // 2, 0, min(511, columns - 1)]
    batch = Batch.build(starts, [1] * rows)
    table = torch.randperm(rows * columns // page_size).int().view(rows, -1)
    out = flash_csa.Selection.empty(rows, k, scores=True)
    pool = flash_csa.Pool.empty(rows, 128, scores=True)
    work = flash_csa.schedule(
        batch,
        ratios=[1],
        max_entries=[columns],
        k=k,
        heads=64,
        index_heads=32,
        pool_blocks=128,
        pool_ratio=1,
        num_sms=132,
    )
    args = {
        "scores": scores,
        **_batch_args(batch),
        "k": k,
        "schedule": work[1],
        "block_table": table,
        "ratio": 1,
        "page_size": page_size,
        "workspace": flash_csa.workspace(
            "select", max_rows=rows, k=k, max_entries=columns, pool_blocks=128, num_sms=132
        ),
        "out_positions": out.positions,
        "out_slots": out.slots,
        "out_lengths": out.lengths,
        "out_scores": out.scores,
        "pool_out_blocks": pool.blocks,
        "pool_out_counts": pool.counts,
        "pool_out_scores": pool.scores,
    }
    poison = tuple(n for n in args if n.startswith(("out_", "pool_out_")))
    _compare(Call("select", args), device, poison=poison)
