"""A valid call of every op in every variant, on any device: one table, read by the tests of error
messages, registration, instruction levels and empty inputs, and by the GPU run.

`CALLS[name](Scene(device))` gives a `Call`; its arguments are keyed by the names of the op's
schema, so that a test can swap one of them. Every row of the library's signature table occurs in at
least one call.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

import flash_csa
from flash_csa import RECORDS, Batch

HEADS, INDEX_HEADS = 2, 8
K, POOL_BLOCKS, WINDOW = 16, 2, 16
PAGE_SIZE = 8
SIGNATURES = flash_csa._C.SIGNATURES
COS_SIN = flash_csa.cos_sin_table(64, 160000.0, True)


@dataclass(frozen=True)
class Call:
    """One op and its arguments by name."""

    op: str
    args: dict = field(default_factory=dict)

    def __call__(self) -> None:
        getattr(torch.ops.flash_csa, self.op)(**self.args)

    def but(self, **changes) -> "Call":
        """The same call with other values of some arguments."""
        return replace(self, args=self.args | changes)

    def to(self, device) -> "Call":
        """The same call with its tensors on another device."""

        def moved(value):
            if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
                return [t.to(device) for t in value]
            return value.to(device) if isinstance(value, torch.Tensor) else value

        return replace(self, args={name: moved(value) for name, value in self.args.items()})

    def strided(self) -> "Call":
        """The same call on views with every stride that the signature table leaves free widened."""
        layouts = {label.replace(".", "_"): layout for label, *_, layout, _ in SIGNATURES[self.op]}

        def widened(t: torch.Tensor, layout: str) -> torch.Tensor:
            if layout == "packed" or t.dim() < 2:
                return t
            size = list(t.shape)
            for dim in range(1, t.dim()) if layout == "dense" else [1]:
                size[dim] += 16 // t.element_size() if dim == t.dim() - 1 else 1
            view = t.new_empty(size)[tuple(slice(0, n) for n in t.shape)]
            return view.copy_(t)

        return self.but(
            **{
                name: widened(t, layouts[name])
                for name, t in self.args.items()
                if isinstance(t, torch.Tensor)
            }
        )

    def schema(self) -> list:
        """The op's arguments, in the order of its schema."""
        return getattr(torch.ops.flash_csa, self.op).default._schema.arguments

    def mutated(self) -> dict[str, torch.Tensor]:
        """The tensors that the op may write."""
        return {
            a.name: self.args[a.name]
            for a in self.schema()
            if a.alias_info is not None and self.args.get(a.name) is not None
        }


class Scene:
    """The rows and tables of a small step: two requests, one in the middle, and a padded row."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        start: tuple[int, ...] = (3, 0),
        rows: tuple[int, ...] = (2, 3),
        padding: int = 1,
        pages: int = 2,
        heads: int = HEADS,
        index_heads: int = INDEX_HEADS,
        selected: int = K,
    ):
        self.device = torch.device(device)
        self.heads, self.index_heads = heads, index_heads
        self.selected = selected  # entries of a row in attend's selections
        self.generator = torch.Generator().manual_seed(0)
        self.batch = Batch.build(start, rows, num_rows=sum(rows) + padding, device=device)
        self.rows, self.requests = self.batch.num_rows, self.batch.num_requests
        self.num_pages = self.requests * pages
        self.block_table = self.i32(range(self.num_pages)).view(self.requests, pages)
        # Pages of a request's window.
        self.ring = max(4, -(-(WINDOW - 1 + self.batch.max_rows) // PAGE_SIZE))
        window_pages = range(self.requests * self.ring)
        self.window_table = self.i32(window_pages).view(self.requests, self.ring)
        self.cos_sin = COS_SIN.to(device, copy=True)
        self.positions = self.batch.positions

    def i32(self, values) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def new(self, *size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device)

    def f32(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator).to(self.device)

    def bf16(self, *size: int) -> torch.Tensor:
        return self.f32(*size).bfloat16()

    def bytes(self, *size: int, high: int = 0x100) -> torch.Tensor:
        return torch.randint(0, high, size, generator=self.generator).byte().to(self.device)

    def pages(self, prefix: str, record: str, count: int | None = None) -> dict:
        """Pages of a record, with bytes that decode to finite values, and the ints of both."""
        count = self.num_pages if count is None else count
        size = (count, -(-RECORDS[record].payload(PAGE_SIZE) // 16) * 16)
        ints = prefix.removesuffix("_pages")
        return {
            prefix: self.bytes(*size, high=0x40),
            f"{ints}_record": RECORDS[record].id,
            f"{ints}_page_size": PAGE_SIZE,
        }

    def slots(self, *size: int) -> torch.Tensor:
        """Slots of the main pages, some absent."""
        high = self.num_pages * PAGE_SIZE
        return torch.randint(-1, high, size, generator=self.generator).int().to(self.device)

    def batch_args(self) -> dict:
        names = ("positions", "row_request", "cu_tokens", "start", "tail_slot", "max_rows")
        return {f"batch_{name}": getattr(self.batch, name) for name in names}

    def workspace(self) -> torch.Tensor:
        bounds = {"max_rows": self.rows, "heads": self.heads, "k": K}
        bounds["max_entries"] = max(64, self.block_table.shape[1] * PAGE_SIZE)
        return flash_csa.workspace(
            "index_select", **bounds, pool_blocks=POOL_BLOCKS, num_sms=4, device=self.device
        )

    def step_slots(self, ratio: int) -> flash_csa.StepSlots:
        return flash_csa.step_slots(
            self.batch,
            [self.block_table],
            self.window_table,
            ratios=[ratio],
            page_sizes=[PAGE_SIZE],
            window_page_size=PAGE_SIZE,
            window=WINDOW,
        )

    def schedule(self, section: int, ratio: int = 1) -> torch.Tensor:
        return flash_csa.schedule(
            self.batch,
            ratios=[ratio],
            max_entries=[self.block_table.shape[1] * PAGE_SIZE],
            k=K,
            heads=self.heads,
            index_heads=self.index_heads,
            window=WINDOW,
            pool_blocks=POOL_BLOCKS,
            pool_ratio=ratio,
            contiguous_ratios=[ratio] if section == 4 else [],
            num_sms=4,
        )[section]


CALLS: dict[str, Callable[[Scene], Call]] = {}


def _call(op: str, variant: str = ""):
    """Registers a function of a scene that gives the arguments of one call."""

    def register(arguments: Callable[[Scene], dict]) -> Callable[[Scene], dict]:
        name = f"{op}-{variant}" if variant else op
        CALLS[name] = lambda scene: Call(op, arguments(scene))
        return arguments

    return register


def _register_records() -> None:
    for record in RECORDS.values():

        @_call("store", record.name)
        def _store(s: Scene, record=record) -> dict:
            rows = s.bf16(s.rows, record.dims)
            # Slots of one call do not repeat, but for the absent one.
            capacity = s.num_pages * PAGE_SIZE
            slots = torch.randperm(capacity + s.rows, generator=s.generator)[: s.rows]
            slots[slots >= capacity] = -1
            return {"rows": rows, **s.pages("pages", record.name), "slots": s.i32(slots)}

        @_call("load", record.name)
        def _load(s: Scene, record=record) -> dict:
            out = s.new(s.rows, record.dims, dtype=torch.float32)
            return {**s.pages("pages", record.name), "slots": s.slots(s.rows), "out": out}


_register_records()


@_call("load", "bf16")
def _(s: Scene) -> dict:
    out = s.new(s.rows, 512, dtype=torch.bfloat16)
    return {**s.pages("pages", "MainFp4"), "slots": s.slots(s.rows), "out": out}


@_call("rope_store", "v41")
def _(s: Scene) -> dict:
    return {
        "q": s.bf16(s.rows, s.heads, 512),
        "kv": s.bf16(s.rows, 512),
        **s.pages("window_pages", "WindowFp8", s.requests * s.ring),
        "slots": s.step_slots(1).window_store,
        "positions": s.positions,
        "cos_sin": s.cos_sin,
    }


@_call("rope_store", "v4")
def _(s: Scene) -> dict:
    args = CALLS["rope_store-v41"](s).args
    return args | s.pages("window_pages", "MixedFp8", s.requests * s.ring) | {"q_norm_eps": 1e-6}


@_call("quantize_query", "fp4")
def _(s: Scene) -> dict:
    return {
        "q": s.bf16(s.rows, s.index_heads, 128),
        "positions": s.positions,
        "cos_sin": s.cos_sin,
        "record": RECORDS["IndexFp4"].id,
        "rotate": True,
        "out_codes": s.new(s.rows, s.index_heads, 64, dtype=torch.uint8),
        "out_scales": s.new(s.rows, s.index_heads),
    }


@_call("quantize_query", "fp4-plain")
def _(s: Scene) -> dict:
    return CALLS["quantize_query-fp4"](s).args | {"rotate": False}


@_call("quantize_query", "fp8")
def _(s: Scene) -> dict:
    return CALLS["quantize_query-fp4"](s).args | {
        "record": RECORDS["IndexFp8"].id,
        "rotate": False,
        "out_codes": s.new(s.rows, s.index_heads, 128, dtype=torch.uint8),
        "out_scales": s.new(s.rows, s.index_heads, dtype=torch.float32),
    }


def _compress(s: Scene, ratio: int, dim: int = 512) -> dict:
    """The arguments that every ratio has."""
    width = 2 * dim if ratio == 4 else dim
    args = {
        "kv": s.f32(s.rows, width),
        **s.batch_args(),
        "entry_slots": s.step_slots(ratio).entry_slots[0],
        "ratio": ratio,
        "norm_weight": 1 + s.f32(dim) / 8,
        "eps": 1e-6,
        "cos_sin": s.cos_sin,
        "gate": s.f32(s.rows, width),
        "workspace": s.workspace(),
    }
    if ratio > 1:
        args["tail_rows"] = s.f32(s.requests, 2, 2 * ratio, width)
        args["entry_first"] = s.new(s.requests)
    return args


@_call("compress", "ratio1")
def _(s: Scene) -> dict:
    return _compress(s, 1) | {
        "kv": s.bf16(s.rows, 512),
        "gate": None,
        **s.pages("main_pages", "MainFp4"),
        **s.pages("index_pages", "IndexFp4"),
        "key_weight": s.bf16(128, 512) / 16,
        "key_norm_weight": 1 + s.f32(128) / 8,
    }


@_call("compress", "ratio2")
def _(s: Scene) -> dict:
    return _compress(s, 2) | {
        **s.pages("main_pages", "WindowFp8"),
        **s.pages("index_pages", "IndexFp8"),
        "key_weight": s.bf16(128, 512) / 16,
        "key_norm_weight": 1 + s.f32(128) / 8,
        "latent_out": s.new(s.rows, 512, dtype=torch.bfloat16),
    }


@_call("compress", "ratio2-fp4")
def _(s: Scene) -> dict:
    return CALLS["compress-ratio2"](s).args | {
        **s.pages("main_pages", "MainFp4"),
        **s.pages("index_pages", "IndexFp4"),
    }


@_call("compress", "ratio4")
def _(s: Scene) -> dict:
    return _compress(s, 4) | {"bias": s.f32(4, 1024), **s.pages("main_pages", "MixedFp8")}


@_call("compress", "ratio4-index")
def _(s: Scene) -> dict:
    pages = s.pages("index_pages", "IndexFp4")
    return _compress(s, 4, dim=128) | {"bias": s.f32(4, 256), "rotate": True, **pages}


@_call("compress", "ratio128")
def _(s: Scene) -> dict:
    return _compress(s, 128) | {"bias": s.f32(128, 512), **s.pages("main_pages", "MixedFp8")}


def _query(s: Scene, record: str = "IndexFp4") -> dict:
    """A quantised query and its keys."""
    scale, one = {
        "IndexFp4": (torch.int32, 0x7F7F7F7F),  # four exponents of 0
        "IndexFp8": (torch.float32, 1.0),
    }[record]
    return {
        "query_codes": s.bytes(s.rows, s.index_heads, RECORDS[record].data_bytes, high=0x78),
        "query_scales": s.new(s.rows, s.index_heads, dtype=scale).fill_(one),
        **s.pages("index_pages", record),
        "weights": s.f32(s.rows, s.index_heads),
    }


def _pool(s: Scene) -> dict:
    """The first block of each row."""
    blocks = torch.full_like(s.new(s.rows, POOL_BLOCKS), -1)
    blocks[:, 0] = 0
    return {"pool_blocks": blocks, "pool_counts": torch.ones_like(s.new(s.rows))}


def _selection_out(s: Scene) -> dict:
    return {
        "workspace": s.workspace(),
        "out_positions": s.new(s.rows, K),
        "out_slots": s.new(s.rows, K),
        "out_lengths": s.new(s.rows),
        "out_scores": s.new(s.rows, K, dtype=torch.float32),
    }


def _pool_out(s: Scene) -> dict:
    return {
        "pool_out_blocks": s.new(s.rows, POOL_BLOCKS),
        "pool_out_counts": s.new(s.rows),
        "pool_out_scores": s.new(s.rows, POOL_BLOCKS, dtype=torch.float32),
    }


def _entries(s: Scene, section: int) -> dict:
    """The batch and its tables, as index and select take them."""
    return s.batch_args() | {
        "block_table": s.block_table,
        "schedule": s.schedule(section),
        "ratio": 1,
    }


def _columns(s: Scene) -> int:
    return s.block_table.shape[1] * PAGE_SIZE


@_call("index_scores", "flat")
def _(s: Scene) -> dict:
    out = s.new(s.rows, _columns(s), dtype=torch.float32)
    return _query(s) | _entries(s, 1) | {"workspace": s.workspace(), "out": out}


@_call("index_scores", "pool")
def _(s: Scene) -> dict:
    out = s.new(s.rows, 8 * POOL_BLOCKS, dtype=torch.float32)
    args = _query(s) | _entries(s, 2) | _pool(s) | {"workspace": s.workspace(), "out": out}
    return args | {"weights": args["weights"].bfloat16()}


@_call("index_scores", "fp8")
def _(s: Scene) -> dict:
    return CALLS["index_scores-flat"](s).args | _query(s, "IndexFp8")


def _select(s: Scene, section: int) -> dict:
    return {
        "scores": s.f32(s.rows, _columns(s) if section == 1 else 8 * POOL_BLOCKS),
        **_entries(s, section),
        "page_size": PAGE_SIZE,
        "k": K,
        **_selection_out(s),
    }


@_call("select", "build")
def _(s: Scene) -> dict:
    return _select(s, 1) | _pool_out(s)


@_call("select", "pages-of-6")
def _(s: Scene) -> dict:
    columns = s.block_table.shape[1] * 6
    return _select(s, 1) | {"scores": s.f32(s.rows, columns), "page_size": 6}


@_call("select", "restrict")
def _(s: Scene) -> dict:
    return _select(s, 2) | _pool(s)


@_call("index_select", "build")
def _(s: Scene) -> dict:
    return _query(s) | _entries(s, 1) | {"k": K} | _selection_out(s) | _pool_out(s)


@_call("index_select", "restrict")
def _(s: Scene) -> dict:
    return _query(s) | _entries(s, 2) | {"k": K} | _selection_out(s) | _pool(s)


@_call("normalize_pool")
def _(s: Scene) -> dict:
    return {
        "blocks": s.slots(s.rows, POOL_BLOCKS),
        "positions": s.positions,
        "ratio": 1,
        "max_entries": _columns(s),
        "pool_out_blocks": s.new(s.rows, POOL_BLOCKS),
        "pool_out_counts": s.new(s.rows),
    }


def _attend(s: Scene, section: int, ratio: int = 1) -> dict:
    """Queries and results, without any list."""
    return {
        "q": s.bf16(s.rows, s.heads, 512),
        "sink": s.f32(s.heads),
        "derotate_positions": s.positions,
        "derotate_cos_sin": s.cos_sin,
        "schedule": s.schedule(section, ratio),
        "workspace": s.workspace(),
        "out": s.new(s.rows, s.heads, 512, dtype=torch.bfloat16),
        "lse": s.new(s.rows, s.heads, dtype=torch.float32),
    }


def _window(s: Scene, record: str) -> dict:
    lists = s.step_slots(1).lists
    pages = s.pages("window_pages", record, s.requests * s.ring)
    return pages | {"window_slots": lists.slots, "window_lengths": lists.lengths}


@_call("attend", "selection")
def _(s: Scene) -> dict:
    return _attend(s, 3) | {
        **s.pages("main_pages", "MainFp4"),
        "selection_slots": s.slots(s.rows, s.selected),
        "selection_lengths": torch.full_like(s.new(s.rows), s.selected),
        **_window(s, "WindowFp8"),
    }


@_call("attend", "contiguous")
def _(s: Scene) -> dict:
    return _attend(s, 4, ratio=4) | {
        **s.pages("main_pages", "MixedFp8"),
        "contiguous_block_table": s.block_table,
        "contiguous_row_request": s.batch.row_request,
        "contiguous_n_vis": s.step_slots(4).n_vis[0],
        **_window(s, "MixedFp8"),
    }


@_call("attend", "window")
def _(s: Scene) -> dict:
    out = s.new(s.rows, s.heads, 512, dtype=torch.float32)
    return _attend(s, 0) | _window(s, "WindowFp8") | {"out": out}


def _merge(s: Scene) -> dict:
    return {
        "outs": s.f32(3, s.rows, s.heads, 512),
        "lses": s.f32(3, s.rows, s.heads),
        "sink": s.f32(s.heads),
        "derotate_positions": s.positions,
        "derotate_cos_sin": s.cos_sin,
        "out": s.new(s.rows, s.heads, 512, dtype=torch.bfloat16),
        "lse": s.new(s.rows, s.heads, dtype=torch.float32),
    }


@_call("merge", "f32")
def _(s: Scene) -> dict:
    return _merge(s)


@_call("merge", "bf16")
def _(s: Scene) -> dict:
    args = _merge(s)
    return args | {"outs": args["outs"].bfloat16()}


@_call("merge_selections")
def _(s: Scene) -> dict:
    return {
        "positions": s.i32(range(2 * s.rows * K)).view(2, s.rows, K) % 8,
        "scores": s.f32(2, s.rows, K),
        "k": K,
        "row_request": s.batch.row_request,
        "block_table": s.block_table,
        "page_size": PAGE_SIZE,
        **{name: t for name, t in _selection_out(s).items() if name != "workspace"},
    }


@_call("merge_pools")
def _(s: Scene) -> dict:
    return {
        "blocks": s.i32(range(2 * s.rows * POOL_BLOCKS)).view(2, s.rows, POOL_BLOCKS) % 2,
        "scores": s.f32(2, s.rows, POOL_BLOCKS),
        "positions": s.positions,
        "ratio": 1,
        **_pool_out(s),
    }


@_call("step_slots")
def _(s: Scene) -> dict:
    return {
        **s.batch_args(),
        "block_tables": [s.block_table, s.block_table.clone()],
        "window_table": s.window_table,
        "ratios": [1, 2],
        "page_sizes": [PAGE_SIZE, PAGE_SIZE],
        "window_page_size": PAGE_SIZE,
        "window": WINDOW,
        "window_first": s.new(s.requests),
        "entry_first": s.new(2, s.requests),
        "window_store": s.new(s.rows),
        "lists_slots": s.new(s.rows, WINDOW),
        "lists_lengths": s.new(s.rows),
        "entry_slots": s.new(2, s.rows),
        "n_vis": s.new(2, s.rows),
    }


@_call("schedule")
def _(s: Scene) -> dict:
    return {
        **s.batch_args(),
        "ratios": [1, 128],
        "max_entries": [_columns(s), _columns(s)],
        "k": K,
        "heads": s.heads,
        "index_heads": s.index_heads,
        "window": WINDOW,
        "window_first": s.new(s.requests),
        "pool_blocks": POOL_BLOCKS,
        "pool_ratio": 1,
        "contiguous_ratios": [128],
        "num_sms": 4,
        "out": s.new(9, flash_csa.schedule_size(num_sms=4, max_rows_total=s.rows)),
    }


@_call("probe")
def _(s: Scene) -> dict:
    return {
        "out": s.new(1 + len(RECORDS)),
        "records": s.new(5, RECORDS["MainFp4"].bytes, dtype=torch.uint8),
        "slots": s.new(3),
    }
