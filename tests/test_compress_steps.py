"""compress over steps: every way of cutting the input, tails, rollbacks, and rows and slots that
must not count."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flash_csa as fc
from compress_case import (
    CPU,
    KINDS,
    MAX_POS,
    Cache,
    Chunk,
    Kind,
    call,
    entry_slots,
    every_kind,
    every_tailed_kind,
    one_call,
    pack,
    projections,
    run,
    same,
    step,
)
from flash_csa.reference import pages as ref_pages
from flash_csa.reference import quant

LENGTHS = (1, 2, 3, 7, 8, 127, 128, 129, 255, 256, 257)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of an f32 tensor, which compare equal where NaN does not."""
    return x.cpu().view(torch.int32)


# ---- Ways of cutting the input


@functools.cache
def whole(kind: Kind, tokens: int, device: torch.device) -> list[torch.Tensor]:
    return one_call(kind, tokens, device)[0].state()


@pytest.mark.case("Prefill versus decode compression")
@every_kind
@pytest.mark.parametrize("tokens", LENGTHS)
def test_chunks(kind, tokens, device):
    """One call, token by token, chunks of 3 and of ratio - 1, ratio, ratio + 1: the same bytes,
    also in the tail."""
    for size in {tokens, 1, 3, max(kind.ratio - 1, 1), kind.ratio, kind.ratio + 1}:
        cache = Cache(kind, 1, max(tokens // kind.ratio, 1), device)
        run(cache, 0, [projections(kind, tokens)], [*range(size, tokens, size), tokens])
        assert same(cache.state(), whole(kind, tokens, device))


@pytest.mark.case("Prefill versus decode compression")
@pytest.mark.parametrize(
    "name, tokens",
    [("r1", 1300), ("r2", 2601), ("r4", 5001), ("r4.index", 5001), ("r128", 2701)],
)
def test_a_long_step_and_its_parts(name, tokens, device):
    """A long step, short steps, single tokens: the same bytes."""
    kind = KINDS[name]
    inputs = [projections(kind, tokens)]
    cache = Cache(kind, 1, tokens // kind.ratio, device)
    long = tokens - 200
    cuts = [7, long, *range(long + 1, long + 20), tokens - 1, tokens]
    run(cache, 0, inputs, cuts)
    assert same(cache.state(), whole(kind, tokens, device))


@pytest.mark.case("Prefill versus decode compression")
@pytest.mark.parametrize("name, tokens", [("r1", 3), ("r2", 3), ("r4", 9), ("r4.index", 9)])
def test_a_long_step_of_short_requests(name, tokens, device):
    """Every row of a long step closes an entry of its own request: the bytes of short steps, also
    in the tail."""
    kind, requests = KINDS[name], 6200 if name == "r2" else 2100
    kv, gate = projections(kind, tokens * requests)
    rows = [slice(tokens * r, tokens * (r + 1)) for r in range(requests)]
    inputs = [(kv[r], None if gate is None else gate[r]) for r in rows]
    long, short = (Cache(kind, requests, tokens // kind.ratio, device) for _ in range(2))
    for position in range(tokens):
        chunks = [Chunk(r, position, 1) for r in range(requests)]
        step(long, chunks, inputs)
        for first in range(0, requests, 300):
            step(short, chunks[first : first + 300], inputs)
    assert same(long.state(), short.state())


@pytest.mark.case("Batch invariance")
@every_kind
def test_requests_of_several_rows_share_a_step(kind, device):
    """Row r of a step is not one of request r: each has its bytes alone, also in the tail."""
    tokens = 2 * kind.ratio + 9
    inputs = [projections(kind, tokens, seed=20 + r) for r in range(3)]
    entries = tokens // kind.ratio
    together, alone = (Cache(kind, 3, entries, device) for _ in range(2))
    cuts = {0: 5, 1: 2, 2: 7}
    step(together, [Chunk(r, 0, cut) for r, cut in cuts.items()], inputs)
    step(together, [Chunk(r, cut, tokens - cut) for r, cut in cuts.items()], inputs)
    for r, cut in cuts.items():
        step(alone, [Chunk(r, 0, cut)], inputs)
        step(alone, [Chunk(r, cut, tokens - cut)], inputs)
    assert same(together.state(), alone.state())


@pytest.mark.case("Prefill versus decode compression")
@every_kind
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_requests_packed_and_cut_anywhere(kind, data):
    """Requests of any length, cut and interleaved anywhere, with padded rows between: the entries
    of each are those of a run of its own."""
    limit = 40 if kind.ratio < 128 else 400
    lengths = data.draw(st.lists(st.integers(1, limit), min_size=1, max_size=4))
    cuts = [sorted(data.draw(st.sets(st.integers(0, n), max_size=5)) | {n}) for n in lengths]
    cache = Cache(kind, len(lengths), max(max(lengths) // kind.ratio, 1))
    inputs = [projections(kind, n, seed=10 + r) for r, n in enumerate(lengths)]
    done = [0] * len(lengths)
    while any(cuts):
        chunks = []
        for r in data.draw(st.permutations(range(len(lengths)))):
            stop = cuts[r].pop(0) if cuts[r] else done[r]
            chunks.append(Chunk(r, done[r], stop - done[r], padding=data.draw(st.integers(0, 2))))
            done[r] = stop
        step(cache, chunks, inputs, data.draw(st.integers(0, 2)))
    for r, n in enumerate(lengths):
        alone = Cache(kind, len(lengths), cache.entries)
        step(alone, [Chunk(r, 0, n)], inputs)
        assert same(cache.records(r, n // kind.ratio), alone.records(r, n // kind.ratio))
        if kind.ratio > 1:
            assert torch.equal(cache.live_tail(r, n), alone.live_tail(r, n))


@every_kind
def test_levels_and_threads(kind, cpu_level):
    """Every instruction level and any number of threads: the bytes of the first level."""
    tokens = 131 if kind.ratio < 128 else 3 * 128 + 5
    before = torch.get_num_threads()
    states = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        states.append(one_call(kind, tokens)[0].state())
    torch.set_num_threads(before)
    fc._C.set_cpu_level("baseline")
    want = one_call(kind, tokens)[0].state()
    assert all(same(state, want) for state in states)


# ---- Where entries are written


@pytest.mark.case("Padded page stride")
@every_kind
@pytest.mark.parametrize("page_size, padding", [(1, 0), (2, 576), (61, 4096), (64, 64), (256, 16)])
def test_page_geometry(kind, page_size, padding, device):
    """The same records for every geometry, and not one byte besides."""
    tokens = 70 if kind.ratio < 128 else 3 * 128
    entries = tokens // kind.ratio
    want = one_call(kind, tokens, device)[0].records(0, entries)
    cache, expected = (Cache(kind, 1, entries, d, page_size, padding) for d in (device, CPU))
    step(cache, [Chunk(0, 0, tokens)], [projections(kind, tokens)])
    for pages in filter(None, (expected.main, expected.index)):
        data, scales, *want = want
        rows = quant.Quantized(data, scales)
        ref_pages.write_rows(rows, pages.data, cache.slots[0], pages.record, page_size)
    pages_only = slice(None) if kind.ratio == 1 else slice(-1)
    assert same(cache.state()[pages_only], expected.state()[pages_only])


@every_kind
def test_absent_slots_are_computed_and_not_stored(kind, device):
    tokens = 24 if kind.ratio < 128 else 3 * 128
    _, want = one_call(kind, tokens)
    cache = Cache(kind, 1, tokens // kind.ratio, device)
    before = cache.state()
    latents = torch.zeros(tokens, kind.dim, dtype=torch.bfloat16, device=device)
    capacity = (cache.main or cache.index).num_slots
    absent = torch.tensor([-1, capacity, capacity + 1, -2, 2**31 - 1, -(2**31)])
    slots = absent.repeat(tokens)[:tokens].to(torch.int32)
    kv, gate, batch = pack(kind, [Chunk(0, 0, tokens)], [projections(kind, tokens)])
    call(cache, kv, gate, batch, slots, latent_out=latents)
    pages_only = slice(None) if kind.ratio == 1 else slice(-1)
    assert same(cache.state()[pages_only], before[pages_only])
    assert torch.equal(latents.cpu()[kind.ratio - 1 :: kind.ratio], want)


@pytest.mark.case("Slot 0 pollution")
@pytest.mark.parametrize("name, tokens", [("r128", 127), ("r4", 3), ("r4.index", 3), ("r2", 1)])
def test_open_groups_store_nothing(name, tokens, device):
    kind, requests = KINDS[name], 8
    cache = Cache(kind, requests, 2, device, fill=0x5A)
    inputs = [projections(kind, tokens + 1, seed=r) for r in range(requests)]
    buffers = [pages for pages in (cache.main, cache.index) if pages is not None]
    before = [pages.data.cpu().clone() for pages in buffers]
    for t in range(tokens):
        step(cache, [Chunk(r, t, 1) for r in range(requests)], inputs)
    assert same([pages.data.cpu() for pages in buffers], before)
    step(cache, [Chunk(r, tokens, 1) for r in range(requests)], inputs)
    for pages, old in zip(buffers, before, strict=True):
        slots = torch.arange(pages.num_slots)
        now, was = (
            ref_pages.read_rows(data, slots, pages.record, pages.page_size).data
            for data in (pages.data.cpu(), old)
        )
        assert set((now != was).any(1).nonzero().flatten().tolist()) == set(
            cache.slots[:, 0].tolist()
        )


@every_kind
def test_entries_that_are_stored_already_stay(kind, device):
    """entry_first: earlier entries are neither computed nor stored, nor are their rows kept."""
    tokens = 40 if kind.ratio < 128 else 4 * 128
    entries, first = tokens // kind.ratio, 3 if kind.ratio < 128 else 2
    want = one_call(kind, tokens, device)[0]
    cache = Cache(kind, 1, entries, device)
    poison = cache.records(0, first)
    latents = torch.full((tokens, kind.dim), torch.nan, dtype=torch.bfloat16, device=device)
    stored = torch.tensor([first], dtype=torch.int32)
    inputs = [projections(kind, tokens)]
    step(cache, [Chunk(0, 0, tokens)], inputs, entry_first=stored, latent_out=latents)
    assert same(cache.records(0, first), poison)
    new = [part[first:] for part in cache.records(0, entries)]
    assert same(new, [part[first:] for part in want.records(0, entries)])
    assert (~latents.isnan()).any(1).nonzero().min() == (first + 1) * kind.ratio - 1
    if kind.ratio == 1:
        return
    cache = Cache(kind, 1, entries, device)
    length = first * kind.ratio + 1  # one row behind the stored entries
    step(cache, [Chunk(0, 0, length)], inputs, entry_first=stored)
    written = (~cache.tail.rows.isnan()).flatten(2).all(2).all(1).cpu()
    ring = cache.tail.rows[0, 0].cpu()
    kept = (~ring.isnan()).all(1).nonzero().flatten().tolist()
    assert written.all() or kept == [(length - 1) % len(ring)]


# ---- Tails


@pytest.mark.case("Tail state isolation")
@every_tailed_kind
def test_slots_are_taken_over_clean(kind, device):
    """A request of odd length leaves its tail slot; what runs there next is as in a fresh cache."""
    tokens = kind.span + 1
    inputs = [projections(kind, tokens, seed=5)] * 2
    used = Cache(kind, 1, 4, device)
    step(used, [Chunk(0, 0, tokens)], [projections(kind, tokens, seed=4)])
    fresh = Cache(kind, 1, 4, device)
    for cache in (used, fresh):
        run(cache, 0, inputs, range(1, tokens + 1))
    assert same(used.records(0, tokens // kind.ratio), fresh.records(0, tokens // kind.ratio))
    assert torch.equal(used.live_tail(0, tokens), fresh.live_tail(0, tokens))


@pytest.mark.case("Tail state isolation")
@every_tailed_kind
def test_shared_prefix_and_batch_order(kind, device):
    """Two requests share 10 tokens, then diverge; the order of the batch changes every step."""
    tokens = 24 if kind.ratio < 128 else 140
    inputs = [[x.clone() for x in projections(kind, tokens, seed=s)] for s in (1, 2, 3)]
    for part in range(2):
        inputs[1][part][:10] = inputs[0][part][:10]
    together, apart = Cache(kind, 3, 16, device), Cache(kind, 3, 16, device)
    for t in range(tokens):
        step(together, [Chunk(int(r), t, 1) for r in torch.randperm(3)], inputs)
    for r in range(3):
        run(apart, r, inputs, range(1, tokens + 1))
    assert same(together.state(), apart.state())


@pytest.mark.case("Tail state isolation")
def test_short_prompt_has_no_entry(device):
    kind = KINDS["r128"]
    cache = Cache(kind, 1, 1, device)
    before = cache.main_buffer.clone()
    step(cache, [Chunk(0, 0, 5)], [projections(kind, 5)])
    assert torch.equal(cache.main_buffer, before)


@pytest.mark.case("NaN poison in unused cache")
@every_tailed_kind
@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x80])
def test_unused_tail_rows_do_not_count(kind, byte, device):
    tokens = kind.span + kind.ratio + 1
    caches = [Cache(kind, 2, 8, device) for _ in range(2)]
    for cache, fill in zip(caches, (byte, 0x00), strict=True):
        cache.tail.rows.view(torch.uint8).fill_(fill)
        run(cache, 1, [projections(kind, tokens)] * 2, (kind.ratio - 1, kind.ratio + 1, tokens))
    entries = tokens // kind.ratio
    assert same(caches[0].records(1, entries), caches[1].records(1, entries))


@every_tailed_kind
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_ring_holds_the_last_rows(kind, extra, device):
    """The row of position p at p % ring, kv and gate as they came; what the step does not reach
    stays."""
    for start, rows in ((0, 1), (0, kind.span + extra), (3, 2), (5, 2 * kind.span + 7)):
        cache = Cache(kind, 2, 64, device, max_draft=extra)
        ring = cache.tail.rows.shape[2]
        kv, gate = projections(kind, start + rows)
        want = cache.tail.rows.cpu().clone()
        for p in range(max(start, start + rows - ring), start + rows):
            want[1, 0, p % ring], want[1, 1, p % ring] = kv[p], gate[p]
        step(cache, [Chunk(1, start, rows)], [None, (kv, gate)])
        assert torch.equal(bits(cache.tail.rows), bits(want))


@pytest.mark.case("Rollback of rejected tokens")
@pytest.mark.parametrize("name", ["r2", "r4.index"])
@pytest.mark.parametrize("prefix", [6, 7, 8, 9])
def test_rejected_drafts_leave_no_trace(name, prefix, device):
    """Append d drafts, accept a, go on with the true tokens: as if nothing had been drafted."""
    kind, max_draft, more = KINDS[name], 12, 9
    total = prefix + max_draft + more
    true, draft = (projections(kind, total, seed=s) for s in (6, 7))
    for drafts in range(1, max_draft + 1):
        for accepted in range(drafts + 1):
            length = prefix + accepted
            mixed = [
                torch.cat([t[:length], d[length : prefix + drafts]])
                for t, d in zip(true, draft, strict=True)
            ]
            cache = Cache(kind, 1, total, device, max_draft=max_draft)
            run(cache, 0, [mixed], (prefix, prefix + drafts))
            run(cache, 0, [true], (length + more,), start=length)
            entries = (length + more) // kind.ratio
            want = cached_run(kind, prefix, length + more, total, max_draft, device)
            assert same(cache.records(0, entries), want.records(0, entries))
            assert torch.equal(cache.live_tail(0, length + more), want.live_tail(0, length + more))


@functools.cache
def cached_run(
    kind: Kind, prefix: int, tokens: int, capacity: int, max_draft: int, device: torch.device
) -> Cache:
    """The run that never speculated."""
    cache = Cache(kind, 1, capacity, device, max_draft=max_draft)
    run(cache, 0, [projections(kind, capacity, seed=6)], (prefix, tokens))
    return cache


@every_tailed_kind
def test_missing_tails_skip_entries_that_need_them(kind, device):
    """No tail, or a tail slot outside the range: an entry with earlier rows is not made up."""
    tokens, start = 3 * kind.span, kind.ratio + 1
    entries = torch.arange(tokens // kind.ratio)
    oldest = (entries - (1 if kind.overlap else 0)).clamp(min=0) * kind.ratio
    made = entries[oldest >= start]
    want = one_call(kind, tokens, device)[0].records(0, len(entries))
    chunks = [Chunk(0, start, tokens - start)]
    for tail_slot in (-1, 1, 2**31 - 1, -(2**31), None):
        cache = Cache(kind, 1, len(entries), device)
        tail, expected = bits(cache.tail.rows).clone(), cache.records(0, len(entries))
        for part, full in zip(expected, want, strict=True):
            part[made] = full[made]
        kv, gate, batch = pack(kind, chunks, [projections(kind, tokens)])
        slots = entry_slots(cache, batch, chunks)
        options = {"tail": None} if tail_slot is None else {}
        batch.tail_slot[0] = 0 if tail_slot is None else tail_slot
        latents = torch.full((len(kv), kind.dim), 7.0, dtype=torch.bfloat16, device=device)
        call(cache, kv, gate, batch, slots, latent_out=latents, **options)
        rows = (latents != 7).any(1).nonzero().flatten().cpu()
        assert torch.equal(rows, (made + 1) * kind.ratio - 1 - start)
        assert same(cache.records(0, len(entries)), expected)
        assert torch.equal(bits(cache.tail.rows), tail)


# ---- Rows that must not count


@pytest.mark.case("Lengths into the compressor")
@every_kind
def test_padded_rows_join_no_group(kind, device):
    """Lengths 1..9 padded to 16 with NaN, packed: entries and tails of the unpadded run."""
    lengths = range(1, 10)
    inputs = [projections(kind, n, seed=20 + n) for n in lengths]
    padded, alone = Cache(kind, len(lengths), 9, device), Cache(kind, len(lengths), 9, device)
    step(padded, [Chunk(r, 0, n, padding=16 - n) for r, n in enumerate(lengths)], inputs)
    for r, n in enumerate(lengths):
        step(alone, [Chunk(r, 0, n)], inputs)
    assert same(padded.state(), alone.state())


@every_kind
def test_rows_outside_the_table_or_the_batch_are_padded(kind, device):
    """A position without a row in cos_sin, or a request outside [0, B): closes nothing."""
    chunks, inputs = [Chunk(0, 0, 4)], [projections(kind, 4)]
    cache, want = Cache(kind, 1, 4, device), Cache(kind, 1, 4, device)
    step(want, chunks, inputs)
    kv, gate, batch = pack(kind, chunks, inputs, tail_padding=4)
    slots = entry_slots(cache, batch, chunks)
    slots[4:] = torch.arange(4)
    batch.positions[4:] = torch.tensor([MAX_POS + kind.ratio - 1, 2**31 - 1, 127, 127])
    batch.row_request[4:] = torch.tensor([0, 0, 1, 2**31 - 1])
    call(cache, kv, gate, batch, slots)
    assert same(cache.state(), want.state())


@every_kind
def test_nothing_to_do(kind, device):
    """No rows, no requests; requests without rows keep their tails."""
    cache = Cache(kind, 2, 2, device)
    before = cache.state()
    inputs = [projections(kind, 1)] * 2
    step(cache, [], inputs)
    step(cache, [Chunk(0, 0, 0), Chunk(1, 7, 0, padding=3)], inputs)
    assert same(cache.state(), before)


@every_tailed_kind
def test_strided_inputs(kind, device):
    """kv and gate as halves of one GEMM output."""
    tokens = 2 * kind.span
    both = torch.cat(projections(kind, tokens), 1).to(device)
    cache, want = Cache(kind, 1, tokens // kind.ratio, device), whole(kind, tokens, device)
    chunks = [Chunk(0, 0, tokens)]
    _, _, batch = pack(kind, chunks, [projections(kind, tokens)])
    slots = entry_slots(cache, batch, chunks)
    call(cache, both[:, : kind.width], both[:, kind.width :], batch, slots)
    assert same(cache.state(), want)
