"""schedule: every word of every section against a plain model, and what consumers rely on."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

import flash_csa
from flash_csa.reference import step as reference

ATTEND_TILE, INDEX_TILE, HEAD_BLOCK, POOL_BLOCK = 64, 256, 64, 8
HEADER, RANGE = 8, 4


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def row_tiles(batch, section: int, *, ratios, max_entries, k, window=128, window_first=None,
              pool_blocks=0, pool_ratio=0, contiguous_ratios=(), strict=False,
              **_) -> list[int]:  # fmt: skip
    """Tiles of each row: ceil(length / tile) of each of its lists."""
    tiles = []
    i = (section - 1) // 4
    kind = ("index", "reindex", "attend", "contiguous")[(section - 1) % 4] if section else "window"
    for p, r in zip(batch.positions.tolist(), batch.row_request.tolist(), strict=True):
        if p < 0 or not 0 <= r < batch.num_requests:
            tiles.append(0)
            continue
        first = 0 if window_first is None else int(window_first[r])
        windows = ceil_div(len(reference.window_positions(p, window, first)), ATTEND_TILE)
        if kind == "window":
            tiles.append(windows)
            continue
        n_vis = min((p if strict else p + 1) // ratios[i], max_entries[i])
        dense = ratios[i] in contiguous_ratios
        pooled = min(ceil_div(n_vis, POOL_BLOCK), pool_blocks) * POOL_BLOCK
        tiles.append({
            "index": 0 if dense else ceil_div(n_vis, INDEX_TILE),
            "reindex": ceil_div(pooled, INDEX_TILE) if ratios[i] == pool_ratio else 0,
            "attend": 0 if dense else windows + ceil_div(min(k, n_vis), ATTEND_TILE),
            "contiguous": windows + ceil_div(n_vis, ATTEND_TILE) if dense else 0,
        }[kind])  # fmt: skip
    return tiles


@dataclass
class Section:
    """One section as a consumer reads it."""

    words: list[int]
    rows: int

    def __post_init__(self):
        (self.rows_with_work, self.total_tiles, self.run, self.tile, self.workers,
         self.num_partials, self.may_cut, self.num_sms) = self.words[:HEADER]  # fmt: skip
        table = self.words[HEADER : HEADER + RANGE * self.num_sms]
        self.ranges = [tuple(table[i : i + RANGE]) for i in range(0, len(table), RANGE)]
        self.partials = self.words[HEADER + RANGE * self.num_sms :][: self.rows + 1]

    def pieces(self, tiles: list[int]) -> list[list[tuple[int, int, int]]]:
        """Of each worker: (row, first tile, end tile) of all rows that it owns or shares."""
        work = []
        for first_row, first_tile, end_row, end_tile in self.ranges:
            mine = []
            for row in range(first_row, end_row + 1):
                begin = first_tile if row == first_row else 0
                end = end_tile if row == end_row else tiles[row]
                if row < end_row or end > begin:
                    mine.append((row, begin, end))
            work.append(mine)
        return work


def model(tiles: list[int], workers: int, num_sms: int, may_cut: bool) -> tuple[list, list, int]:
    """Ranges, partials and run length: all tiles in a row, cut into equal runs."""
    run = max(1, ceil_div(sum(tiles), workers))
    places = [(row, tile) for row, count in enumerate(tiles) for tile in range(count)]
    borders = [(0, 0)]
    for worker in range(1, num_sms + 1):
        row, tile = places[worker * run] if worker * run < len(places) else (len(tiles), 0)
        borders.append((row, tile) if may_cut or tile == 0 else (row + 1, 0))
    partials, start = [0], 0
    for count in tiles:
        workers_of_row = {tile // run for tile in range(start, start + count)}
        cut = may_cut and len(workers_of_row) > 1
        partials.append(partials[-1] + (len(workers_of_row) if cut else 0))
        start += count
    return [(*a, *b) for a, b in pairwise(borders)], partials, run


def check(batch, device="cpu", **asked) -> list[Section]:
    """All sections, word for word."""
    rows, num_sms = batch.num_rows, asked["num_sms"]
    size = flash_csa.schedule_size(num_sms=num_sms, max_rows_total=rows) + 8
    out = torch.full((1 + 4 * len(asked["ratios"]), size), -77, dtype=torch.int32, device=device)
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in asked.items()}
    fields = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(batch).items()}
    flash_csa.schedule(flash_csa.Batch(**fields), out=out, **moved)
    assert (out[:, -8:] == -77).all()
    sections = []
    for number, words in enumerate(out.tolist()):
        section = Section(words, rows)
        tiles = row_tiles(batch, number, **asked)
        index = number % 4 in (1, 2)
        workers = num_sms if index else max(1, num_sms // ceil_div(asked["heads"], HEAD_BLOCK))
        may_cut = index or not asked.get("batch_invariant", False)
        ranges, partials, run = model(tiles, workers, num_sms, may_cut)
        assert section.ranges == ranges
        assert section.partials == partials
        assert words[:HEADER] == [
            sum(t > 0 for t in tiles), sum(tiles), run, INDEX_TILE if index else ATTEND_TILE,
            workers, partials[-1], may_cut, num_sms,
        ]  # fmt: skip
        check_consumer(section, tiles)
        sections.append(section)
    return sections


def check_consumer(section: Section, tiles: list[int]) -> None:
    """Every row has one owner, every tile one worker; partials are numbered as documented."""
    owners, done, partial_of = [0] * len(tiles), [0] * len(tiles), {}
    for mine in section.pieces(tiles):
        for row, begin, end in mine:
            assert begin == done[row]  # workers go through a row in order
            owners[row] += begin == 0
            done[row] = end
            index = section.partials[row] + ceil_div(begin, section.run)
            partial_of.setdefault(row, []).append(index)
        if section.may_cut:
            assert sum(end - begin for _, begin, end in mine) <= section.run
    assert owners == [1] * len(tiles) and done == tiles
    for row, (before, after) in enumerate(pairwise(section.partials)):
        if after > before:
            assert partial_of[row] == list(range(before, after))
        else:
            assert len(partial_of[row]) == 1


BATCHES = {
    "decode": ([600, 5, 70000, 1, 0], [1] * 5, None),
    "drafts": ([600, 5, 70000], [3] * 3, None),
    "prefill": ([0, 900], [150, 70], None),
    "padded": ([0, 5000, 30], [0, 2, 1], [3, 4, 1]),
    "one long": ([100000] + [900] * 30, [1] * 31, None),
    "empty": ([], [], None),
}
MODEL = {
    "ratios": (1, 2, 128),
    "max_entries": (100000, 30000, 512),
    "k": 512,
    "index_heads": 32,
    "pool_blocks": 300,
    "pool_ratio": 1,
    "contiguous_ratios": (128,),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("num_sms", [1, 3, 132])
@pytest.mark.parametrize("heads", [8, 128])
def test_words(name, num_sms, heads, device):
    start, rows, owned = BATCHES[name]
    batch = flash_csa.Batch.build(start, rows, owned=owned, num_rows=sum(owned or rows) + 2)
    first = torch.tensor([max(0, s - 50) for s in start], dtype=torch.int32)
    asked = {**MODEL, "num_sms": num_sms, "heads": heads}
    check(batch, device, **asked)
    check(batch, device, **asked, batch_invariant=True)
    check(batch, device, **asked, strict=True, window=70, window_first=first)


@pytest.mark.case("Schedules")
@pytest.mark.parametrize("rows", [511, 512, 513, 1537])
def test_more_rows_than_a_block_has_threads(rows, device):
    positions = torch.randint(0, 1500, (rows,)).tolist()
    batch = flash_csa.Batch.decode(positions)
    check(batch, device, ratios=(1,), max_entries=(1500,), k=512, heads=64, index_heads=32,
          num_sms=132)  # fmt: skip


@pytest.mark.case("All lengths zero")
@pytest.mark.parametrize("rows", [1, 32, 33])
@pytest.mark.parametrize("busy", [None, 0, -1])
def test_nearly_no_work(rows, busy, device):
    """Fewer tiles than workers, or none at all: every row still has one owner."""
    batch = flash_csa.Batch.build([0] * rows, [1] * rows)
    positions = torch.full((rows,), -1, dtype=torch.int32)
    if busy is not None:
        positions[busy] = 3000
    batch.positions.copy_(positions)
    sections = check(batch, device, ratios=(4,), max_entries=(4096,), k=512, heads=64,
                     index_heads=64, num_sms=132)  # fmt: skip
    if busy is None:
        assert all(s.total_tiles == 0 for s in sections)


@pytest.mark.case("Schedules")
def test_one_long_row_is_shared_by_all_workers(device):
    """1 x 1M + 31 x 1K entries: nobody has more than its share, 1 % above that of 1M alone."""
    asked = {"ratios": (1,), "max_entries": (1 << 20,), "k": 512, "heads": 64, "index_heads": 32,
             "num_sms": 132}  # fmt: skip
    alone = check(flash_csa.Batch.decode([(1 << 20) - 1]), device, **asked)[1]
    mixed = check(flash_csa.Batch.decode([(1 << 20) - 1] + [1000] * 31), device, **asked)[1]
    assert mixed.run <= 1.05 * alone.run
    # The long row's pieces lie with every worker but those of the short rows' few tiles.
    assert mixed.partials[1] >= 0.95 * mixed.workers


@pytest.mark.case("Schedules")
def test_rows_beyond_capacity_are_refused(device):
    batch = flash_csa.Batch.decode([100] * 9, device=device)
    size = flash_csa.schedule_size(num_sms=4, max_rows_total=4)
    out = torch.zeros(5, size, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"flash_csa\.schedule: out must have at least \d+ col"):
        flash_csa.schedule(batch, ratios=(1,), max_entries=(64,), k=8, heads=8, index_heads=8,
                           num_sms=4, out=out)  # fmt: skip
    assert not out.any()


@pytest.mark.parametrize("heads", [1, 8, 64, 65, 128, 200])
@pytest.mark.parametrize("num_sms", [1, 2, 16, 132])
def test_partials_fit_the_workspace(heads, num_sms):
    """FP32 outputs and lse of every partial of the worst batches."""
    room = flash_csa.workspace_bytes("attend", max_rows=1, heads=heads, num_sms=num_sms)
    for lengths in ([9000], [9000] * num_sms, [700] * (num_sms + 1), [64 * 30] * (num_sms * 3)):
        batch = flash_csa.Batch.decode(lengths)
        sections = check(batch, ratios=(1,), max_entries=(8192,), k=512, heads=heads,
                         index_heads=8, num_sms=num_sms, contiguous_ratios=(1,))  # fmt: skip
        assert sections[4].num_partials * heads * 513 * 4 <= room - flash_csa.SYNC_BYTES


@pytest.mark.parametrize("op", ["attend", "select", "index_select"])
def test_default_workspace_has_room_for_every_sm(op, device):
    bounds = {"heads": 8, "k": 512, "max_entries": 4096}
    num_sms = flash_csa.default_num_sms(device) if device.type == "cuda" else 1
    needed = flash_csa.workspace_bytes(op, max_rows=1, num_sms=num_sms, **bounds)
    assert flash_csa.workspace(op, device=device, **bounds).numel() == needed


@pytest.mark.case("Batch invariance")
def test_batch_invariant_rows_stay_whole(device):
    batch = flash_csa.Batch.decode([100000, 3, 5000, 70000, 8])
    asked = {**MODEL, "num_sms": 132, "heads": 64}
    for number, section in enumerate(check(batch, device, **asked, batch_invariant=True)):
        if number % 4 not in (1, 2):  # scores are exact however rows are divided
            assert section.num_partials == 0


@pytest.mark.case("Self-consistency")
def test_reruns(device):
    batch = flash_csa.Batch.build([0, 5000], [129, 4], device=device)
    asked = {**MODEL, "num_sms": 132, "heads": 64}
    used = HEADER + RANGE * 132 + batch.num_rows + 1  # the rest is undefined
    first = flash_csa.schedule(batch, **asked)[:, :used]
    for _ in range(20):
        assert torch.equal(flash_csa.schedule(batch, **asked)[:, :used], first)
