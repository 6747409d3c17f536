"""step_slots: window lists, entry slots and visible counts against the reference."""

from types import SimpleNamespace

import pytest
import torch

import flash_csa
from flash_csa.reference import step as reference

I32 = {"dtype": torch.int32}
GUARD = -77


def tables(requests: int, columns: int, holes: float = 0.0) -> torch.Tensor:
    """Distinct pages i32 [requests, columns], some of them missing."""
    table = torch.randperm(requests * columns, **I32).view(requests, columns)
    table[torch.rand(table.shape) < holes] = -1
    return table


def run(batch, block_tables, window_table, device="cpu", **options) -> flash_csa.StepSlots:
    """step_slots into poisoned results inside guard bands, on the CPU again."""
    rows, ratios, window = len(batch.positions), len(block_tables), options.get("window", 128)

    def guarded(*shape: int) -> torch.Tensor:
        return torch.full([n + 2 for n in shape], GUARD, device=device, **I32)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x[1:-1] if x.dim() == 1 else x[1:-1, 1:-1]

    guards = [guarded(rows), guarded(rows, window), guarded(rows), guarded(ratios, rows),
              guarded(ratios, rows)]  # fmt: skip
    store, lists, lengths, entries, n_vis = map(inner, guards)
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    flash_csa.step_slots(
        flash_csa.Batch(**{k: v.to(device) if isinstance(v, torch.Tensor) else v
                           for k, v in vars(batch).items()}),
        [table.to(device) for table in block_tables],
        window_table.to(device),
        out=flash_csa.StepSlots(store, flash_csa.Window(lists, lengths), entries, n_vis),
        **moved,
    )  # fmt: skip
    for whole in guards:
        inside = inner(whole).clone()
        inner(whole).fill_(GUARD)
        assert (whole == GUARD).all(), "wrote outside its result"
        inner(whole).copy_(inside)
    window_lists = flash_csa.Window(lists.cpu(), lengths.cpu())
    return flash_csa.StepSlots(store.cpu(), window_lists, entries.cpu(), n_vis.cpu())


def assert_same(found, expected) -> None:
    assert torch.equal(found.window_store, expected.window_store)
    assert torch.equal(found.lists.slots, expected.lists.slots)
    assert torch.equal(found.lists.lengths, expected.lists.lengths)
    assert torch.equal(found.entry_slots, expected.entry_slots)
    assert torch.equal(found.n_vis, expected.n_vis)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("page_sizes", [(64, 64, 8), (1, 61, 256), (4, 1, 69)])
@pytest.mark.parametrize("window_page_size", [1, 16, 64, 61])
def test_random_batches(page_sizes, window_page_size, strict, device):
    """Chunks, decode rows, empty requests and padding; some pages are missing."""
    window, ratios = 32, (1, 2, 128)
    batch = flash_csa.Batch.build([0, 5, 600, 255, 1000, 0], [40, 1, 7, 3, 0, 0],
                                  owned=[40, 3, 8, 3, 0, 2], num_rows=61)  # fmt: skip
    columns = -(-(window - 1 + batch.max_rows) // window_page_size)
    asked = {
        "ratios": ratios,
        "page_sizes": page_sizes,
        "window_page_size": window_page_size,
        "window": window,
        "strict": strict,
    }
    for replayed in (False, True):
        if replayed:
            asked["window_first"] = torch.tensor([10, 0, 601, 240, 0, 0], **I32)
            asked["entry_first"] = torch.tensor([[20, 5, 603, 256, 0, 0], [10, 3, 302, 0, 0, 0],
                                                 [0, 0, 4, 2, 9, 0]], **I32)  # fmt: skip
        block_tables = [tables(6, -(-700 // (ratio * size)), 0.1)
                        for ratio, size in zip(ratios, page_sizes, strict=True)]  # fmt: skip
        window_table = tables(6, columns, 0.1)
        expected = reference.step_slots(batch, block_tables, window_table, **asked)
        assert_same(run(batch, block_tables, window_table, device, **asked), expected)


def test_by_hand(device):
    """Two requests of pages of 4: a chunk from the start, and a decode row in a wrapped ring."""
    batch = flash_csa.Batch.build([0, 13], [3, 1], owned=[3, 2])
    block_table = torch.tensor([[7, -1, -1, -1], [3, 9, -1, 5]], **I32)
    window_table = torch.tensor([[1, 2, 8], [4, 0, 6]], **I32)
    slots = run(batch, [block_table], window_table, device, ratios=[2], page_sizes=[4],
                window_page_size=4, window=8)  # fmt: skip
    assert slots.window_store.tolist() == [4, 5, 6, 17, -1]
    assert slots.lists.lengths.tolist() == [1, 2, 3, 8, 0]
    assert slots.lists.slots[2].tolist() == [4, 5, 6, -1, -1, -1, -1, -1]
    # Positions 6..13: pages 1, 2, 3 of the request, in columns 1, 2, 0 of the ring.
    assert slots.lists.slots[3].tolist() == [2, 3, 24, 25, 26, 27, 16, 17]
    assert slots.entry_slots.tolist() == [[-1, 28, -1, 38, -1]]
    assert slots.n_vis.tolist() == [[0, 1, 1, 7, 0]]


@pytest.mark.case("Visibility at group edges")
@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
def test_visibility(ratio, device):
    """Entry g is visible from its closing token on, strict: from the next; closing is inclusive."""
    positions = [p for p in (0, ratio - 2, ratio - 1, ratio, 2 * ratio - 1, 2 * ratio) if p >= 0]
    batch = flash_csa.Batch.build(positions, [1] * len(positions))
    block_table = torch.arange(len(positions) * 3, **I32).view(-1, 3)
    window_table = torch.zeros(len(positions), 2, **I32)
    for strict in (False, True):
        slots = run(batch, [block_table], window_table, device, ratios=[ratio], page_sizes=[1],
                    window_page_size=64, strict=strict)  # fmt: skip
        for row, p in enumerate(positions):
            limit = p if strict else p + 1
            visible = [g for g in range(3) if (g + 1) * ratio <= limit]
            assert int(slots.n_vis[0, row]) == len(visible)
            closed = [g for g in range(3) if (g + 1) * ratio == p + 1]
            expected = 3 * row + closed[0] if closed else -1
            assert int(slots.entry_slots[0, row]) == expected


@pytest.mark.case("Slot 0 pollution")
def test_rows_that_close_nothing_have_no_slot(device):
    """127 tokens at ratio 128 and 3 at ratio 4 are one short of a group."""
    for ratio, tokens in ((128, 127), (4, 3)):
        batch = flash_csa.Batch.build([0] * 8, [tokens] * 8)
        slots = run(batch, [torch.zeros(8, 4, **I32)], tables(8, 4), device, ratios=[ratio],
                    page_sizes=[64], window_page_size=64)  # fmt: skip
        assert (slots.entry_slots == -1).all() and (slots.n_vis == 0).all()


@pytest.mark.parametrize("page", [-2, -(2**31), 2**31 - 1, 1 << 25])
def test_table_values_are_not_trusted(page, device):
    """A page that has no slot of 32 bits, or is negative, is absent."""
    batch = flash_csa.Batch.build([130], [1])
    table = torch.full((1, 4), page, **I32)
    slots = run(batch, [table], table, device, ratios=[1], page_sizes=[64], window_page_size=64)
    assert slots.window_store.tolist() == [-1] and slots.entry_slots.tolist() == [[-1]]
    assert (slots.lists.slots == -1).all() and slots.lists.lengths.tolist() == [128]
    assert slots.n_vis.tolist() == [[131]]


def test_table_shorter_than_the_request(device):
    """n_vis ends with the table; an entry behind it has no slot."""
    batch = flash_csa.Batch.build([500], [4])
    slots = run(batch, [torch.tensor([[3, 1]], **I32), torch.empty(1, 0, **I32)], tables(1, 5),
                device, ratios=[1, 2], page_sizes=[16, 16], window_page_size=64)  # fmt: skip
    assert slots.n_vis.tolist() == [[32] * 4, [0] * 4]
    assert (slots.entry_slots == -1).all()


@pytest.mark.parametrize("position", [2**31 - 1, 2**31 - 2, 1 << 20])
def test_extreme_positions(position, device):
    batch = flash_csa.Batch(**{name: torch.tensor(value, **I32) for name, value in (
        ("positions", [position]), ("row_request", [0]), ("cu_tokens", [0, 1]),
        ("start", [position]), ("tail_slot", [0]))}, max_rows=1)  # fmt: skip
    slots = run(batch, [torch.zeros(1, 3, **I32)], tables(1, 3), device, ratios=[2],
                page_sizes=[64], window_page_size=64)  # fmt: skip
    assert slots.lists.lengths.tolist() == [128] and slots.n_vis.tolist() == [[192]]
    assert (slots.lists.slots >= 0).all() and slots.lists.slots.unique().numel() == 128


@pytest.mark.case("Padded query rows")
@pytest.mark.parametrize("owner", [-1, -(2**31), 3, 2**31 - 1])
def test_padded_rows(owner, device):
    """No position or no such request: every result says that there is nothing."""
    batch = SimpleNamespace(**vars(flash_csa.Batch.build([9, 20, 30], [2, 2, 2])))
    batch.row_request = batch.row_request.clone()
    batch.row_request[1], batch.positions[4] = owner, -1
    slots = run(batch, [tables(3, 30)], tables(3, 40), device, ratios=[1], page_sizes=[4],
                window_page_size=4)  # fmt: skip
    padded = torch.tensor([1, 4])
    assert (slots.window_store[padded] == -1).all() and (slots.lists.lengths[padded] == 0).all()
    assert (slots.lists.slots[padded] == -1).all()
    assert (slots.entry_slots[0, padded] == -1).all() and (slots.n_vis[0, padded] == 0).all()
    kept = torch.tensor([0, 2, 3, 5])
    assert (slots.window_store[kept] >= 0).all() and (slots.n_vis[0, kept] > 0).all()


@pytest.mark.parametrize("requests", [0, 3])
def test_no_rows(requests, device):
    batch = flash_csa.Batch.build([0] * requests, [0] * requests)
    slots = run(batch, [tables(requests, 2)], tables(requests, 3), device, ratios=[1],
                page_sizes=[64], window_page_size=64)  # fmt: skip
    assert slots.window_store.numel() == 0 and slots.n_vis.shape == (1, 0)


def test_no_ratios(device):
    batch = flash_csa.Batch.build([7], [1])
    slots = run(batch, [], torch.tensor([[2, 1, 0]], **I32), device, ratios=[], page_sizes=[],
                window_page_size=64, window=4)  # fmt: skip
    assert slots.lists.slots.tolist() == [[132, 133, 134, 135]]
    assert slots.entry_slots.shape == (0, 1)
