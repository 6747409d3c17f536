"""Caches, lists and comparisons that the tests of attend and merge share."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

import flash_csa
from flash_csa.reference import attend as reference
from flash_csa.reference import ops as reference_ops
from flash_csa.reference import pages as reference_pages
from reference_data import randn

POISON = 0xFF  # NaN scales and NaN codes in every record


def filled_pages(
    record: str, page_size: int, rows: torch.Tensor, *, fill: int = POISON, spare: int = 2
) -> tuple[flash_csa.Pages, torch.Tensor]:
    """Pages that hold `rows` bf16 [n, 512] at random slots i32 [n]; all other bytes are `fill`."""
    num_pages = -(-len(rows) // page_size) + spare
    pages = flash_csa.Pages.empty(num_pages, record, page_size)
    pages.data.fill_(fill)
    slots = torch.randperm(pages.num_slots)[: len(rows)].int()
    reference_pages.store(rows, pages.data, slots, record, page_size)
    return pages, slots


EITHER_LIST = [  # records and page sizes of main and window
    (("MainFp4", 1), ("WindowFp8", 64)),
    (("MainFp4", 4), ("WindowFp8", 1)),
    (("MainFp4", 61), ("WindowFp8", 256)),
    (("MainFp4", 256), ("WindowFp8", 61)),
    (("WindowFp8", 64), ("WindowFp8", 64)),
    (("MainFp4", 64), ("MainFp4", 4)),
    (("MixedFp8", 64), ("MixedFp8", 61)),
    (("MixedFp8", 1), ("WindowFp8", 4)),
    (("MainFp4", 48), None),
    (None, ("WindowFp8", 48)),
    (None, ("MixedFp8", 256)),
]


@dataclass(frozen=True)
class Case:
    """Inputs of one attend call, on the CPU."""

    q: torch.Tensor
    main: flash_csa.Pages | None = None
    selection: flash_csa.Selection | None = None
    window_pages: flash_csa.Pages | None = None
    window: flash_csa.Window | None = None
    contiguous: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    sink: torch.Tensor | None = None
    softmax_scale: float = 512**-0.5

    def lists(self) -> dict:
        names = ("main", "selection", "window_pages", "window", "contiguous")
        return {name: getattr(self, name) for name in names}

    def reference_lists(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantised records and the rows of them that each query reads."""
        given = {name: value for name, value in self.lists().items() if value is not None}
        return reference_ops.attend_lists(**given)

    def rows(self, rows) -> "Case":
        """The same case for some of its query rows."""

        def cut(lists, kind):
            return lists and kind(lists.slots[rows], lists.lengths[rows])

        return replace(
            self,
            q=self.q[rows],
            selection=cut(self.selection, selection),
            window=cut(self.window, flash_csa.Window),
        )


def selection(slots: torch.Tensor, lengths: torch.Tensor) -> flash_csa.Selection:
    """A selection of slots; attend does not read its positions."""
    return flash_csa.Selection(positions=slots, slots=slots, lengths=lengths)


def lists_of(slots: torch.Tensor, lengths: list[int], width: int) -> tuple[torch.Tensor, ...]:
    """A random list i32 [R, width] per row of that many of `slots`, and lengths i32 [R].

    Columns behind a row's length hold slots that nothing may read.
    """
    lists = torch.randint(0, 1 << 20, (len(lengths), width), dtype=torch.int32)
    for row, length in enumerate(lengths):
        lists[row, :length] = slots[torch.randint(len(slots), (length,))]
    return lists, torch.tensor(lengths, dtype=torch.int32)


def random_case(
    *,
    heads: int = 8,
    lengths: list[int] = (200, 64, 1, 0),
    window_lengths: list[int] = (128, 3, 0, 0),
    main: tuple[str, int] | None = ("MainFp4", 64),
    window: tuple[str, int] | None = ("WindowFp8", 64),
    width: int = 256,
    entries: int = 300,
    scale: float = 1.0,
    sink: bool = True,
    fill: int = POISON,
    spare: int = 2,
) -> Case:
    """Gaussian queries and records; `main` and `window` are (record, page size)."""
    parts = {}
    if main is not None:
        parts["main"], slots = filled_pages(main[0], main[1], scale * randn(entries, 512, seed=1),
                                            fill=fill, spare=spare)  # fmt: skip
        parts["selection"] = selection(*lists_of(slots, list(lengths), width))
    if window is not None:
        parts["window_pages"], slots = filled_pages(window[0], window[1], scale * randn(150, 512),
                                                    fill=fill)  # fmt: skip
        parts["window"] = flash_csa.Window(*lists_of(slots, list(window_lengths), 128))
    q = scale * randn(len(lengths), heads, 512, seed=2)
    return Case(q=q, sink=torch.randn(heads) if sink else None, **parts)


def column_parts(case: Case, count: int) -> list[Case]:
    """Cases without a sink whose records are those of `case`; the first one keeps the window."""
    width = case.selection.slots.shape[1] // count
    parts = []
    for i in range(count):
        slots = case.selection.slots[:, i * width : (i + 1) * width].contiguous()
        lengths = (case.selection.lengths - i * width).clamp(0, width)
        none = replace(case.window, lengths=torch.zeros_like(case.window.lengths))
        window = case.window if i == 0 else none
        parts.append(replace(case, selection=selection(slots, lengths), window=window, sink=None))
    return parts


def schedule_of(rows: int, heads: int, device="cpu", **options) -> torch.Tensor:
    """An attend section for that many rows: a schedule only divides work, any lists go with it."""
    batch = flash_csa.Batch.decode([600] * rows, device=device)
    num_sms = flash_csa.default_num_sms(device)
    asked = {"ratios": [1], "max_entries": [4096], "k": 512, "heads": heads, "index_heads": 0}
    return flash_csa.schedule(batch, num_sms=num_sms, **asked, **options)[3]


def bound_call(
    case: Case, device="cpu", *, dtype: torch.dtype = torch.float32, **options
) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor]:
    """flash_csa.attend on `device`, not yet called, and its output and lse, which are poisoned."""

    def move(x):
        if isinstance(x, torch.Tensor):
            return x.to(device)
        if isinstance(x, flash_csa.Pages):
            return replace(x, data=x.data.to(device))
        if isinstance(x, flash_csa.Window | flash_csa.Selection):
            return replace(x, slots=x.slots.to(device), lengths=x.lengths.to(device))
        return x and tuple(map(move, x))

    rows, heads = case.q.shape[:2]
    out = torch.full(case.q.shape, torch.nan, dtype=dtype, device=device)
    lse = torch.full((rows, heads), torch.nan, device=device)
    space = flash_csa.workspace("attend", device=device, max_rows=rows, heads=heads)
    options = {"schedule": schedule_of(rows, heads, device), "workspace": space, **options}
    call = partial(
        flash_csa.attend,
        move(case.q),
        **{name: move(value) for name, value in case.lists().items()},
        sink=move(case.sink),
        softmax_scale=case.softmax_scale,
        out=out,
        lse=lse,
        **options,
    )
    return call, out, lse


def run(
    case: Case, device="cpu", *, dtype: torch.dtype = torch.float32, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of flash_csa.attend, on the CPU again; both are poisoned before the call."""
    call, out, lse = bound_call(case, device, dtype=dtype, **options)
    call()
    return out.cpu(), lse.cpu()


def spread(case: Case) -> torch.Tensor:
    """A = sum p |v| of every output element, f64 [R, H, 512]: what the bounds are relative to."""
    records, lists = case.reference_lists()
    _, lse = reference.attend(case.q, records, lists, softmax_scale=case.softmax_scale)
    result = torch.zeros(case.q.shape, dtype=torch.float64)
    for t, row in enumerate(lists):
        kv = records[row[row >= 0]].double()
        if len(kv):
            p = (case.q[t].double() @ kv.T * case.softmax_scale - lse[t, :, None]).exp()
            result[t] = p @ kv.abs()
    return result * reference.sink_factor(lse, case.sink)[..., None]


def assert_close(case: Case, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Within the bounds of the specification around FP64 on the decoded records.

    BF16 outputs also point where they should: 1 - cosine <= 5e-6 for every head whose values do
    not cancel.
    """
    records, lists = case.reference_lists()
    asked = {"sink": case.sink, "softmax_scale": case.softmax_scale}
    expected, expected_lse = reference.attend(case.q, records, lists, **asked)
    bf16 = out.dtype == torch.bfloat16
    bound, lse_bound = reference.error_bounds(case.q, records, lists, bf16=bf16, **asked)
    error = (out.double() - expected).abs()
    assert (error <= bound).all(), f"output off by {(error / bound).max():.2f} bounds"
    empty = expected_lse.isinf()
    assert torch.equal(lse.isinf(), empty), "lse infinite in other places"
    assert (lse[empty] == torch.inf).all(), "lse -inf"
    error = (lse.double() - expected_lse)[~empty].abs()
    assert (error <= lse_bound[~empty]).all(), "lse out of bounds"
    if bf16:
        kept = expected.norm(dim=-1) >= 0.1 * spread(case).norm(dim=-1).clamp(min=1e-30)
        # Without the epsilon of torch.cosine_similarity: behind a large sink norms are tiny.
        unit = expected / expected.norm(dim=-1, keepdim=True)
        cosine = (out.double() * unit).sum(dim=-1) / out.double().norm(dim=-1)
        worst = (1 - cosine[kept]).max() if kept.any() else 0.0
        assert worst <= 5e-6, f"1 - cosine is {worst:.2e}"


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    """Bit for bit, for results without NaN."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
