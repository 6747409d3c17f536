"""Borders of sequences: packed batches, requests that continue anywhere, replays, drafts.

Whole layers of both families (ratios 1 and 2; 4, overlapping, and 128) on small stacks. Expected
are the bytes of the request alone, fed in one call, and at every step with `check` the reference.
"""

from dataclasses import replace
from functools import cache, lru_cache

import pytest
import torch

import flash_csa as fc
from border_case import (
    PLANS,
    Part,
    Stack,
    Text,
    World,
    assert_same_rows,
    assert_same_state,
    joined,
)
from compare import assert_same_bytes, difference

FAMILIES = ("v41", "v4")
every_family = pytest.mark.parametrize("family", FAMILIES)
# Lengths around 0, ratio, page (8 entries), window (32 tokens), top-k (16 entries), pool (32).
LENGTHS = {
    "v41": (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65),
    "v4": (0, 1, 3, 4, 5, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257),
}


@cache
def stack_of(family: str) -> Stack:
    return Stack(family)


@cache
def text_of(family: str, tokens: int, seed: int) -> Text:
    return Text.seeded(stack_of(family), tokens, seed)


def world_of(family: str, texts: list[Text], tokens: int, rows: int, **options) -> World:
    return World(stack_of(family), texts, max_tokens=tokens, max_rows=rows, **options)


@lru_cache(32)
def alone(family: str, tokens: int, seed: int, length: int) -> tuple[World, list[dict]]:
    """The first `length` tokens of a text in one call, in a cache of their own."""
    world = world_of(family, [text_of(family, tokens, seed)], tokens, max(length, 1), seed=seed)
    return world, world.step([Part(0, 0, length)]).of(0)


# ---- Packed batches


@every_family
def test_packed_requests_are_those_alone(family):
    """One packed call, then two packed steps of 0 to 3 rows each in another order, with padded
    rows (NaN) between and behind: every request has the bytes of its own run in one call."""
    lengths = LENGTHS[family]
    steps = [[(r * 7 + s) % 4 for r in range(len(lengths))] for s in (0, 1)]
    total = [n + a + b for n, a, b in zip(lengths, *steps, strict=True)]
    most = max(lengths) + 6
    texts = [text_of(family, most, 100 + r) for r in range(len(lengths))]
    world = world_of(family, texts, most, max(lengths) + 2)
    parts = [Part(r, 0, n, padding=r % 3) for r, n in enumerate(lengths)]
    results = [world.step(parts, more_padding=3)]
    done = list(lengths)
    for rows in steps:
        parts = [Part(r, done[r], rows[r], padding=(r + 1) % 3) for r in range(len(lengths))]
        order = torch.randperm(len(lengths)).tolist()
        results.append(world.step([parts[r] for r in order], more_padding=2, check=True))
        done = [n + more for n, more in zip(done, rows, strict=True)]
    for result in results:
        for layer in result.padded():
            assert not layer["out"].any() and (layer["lse"] == torch.inf).all()
            for name in layer.keys() & {"positions", "blocks"}:
                assert (layer[name] == -1).all()
    for r, length in enumerate(total):
        expected, rows = alone(family, most, 100 + r, length)
        assert_same_rows(joined(results, r), rows)
        assert_same_state(world.state(r, length), expected.state(0, length))


@pytest.mark.case("Batch invariance")
@every_family
def test_batch_mates_and_tail_slots_do_not_matter(family):
    """Decode of one request beside others, whose number and order change at every step."""
    tokens, start = 80, 70
    world = world_of(family, [text_of(family, tokens, 200 + r) for r in range(6)], tokens, start)
    for r in range(6):
        world.step([Part(r, 0, start - 8 * (r > 0))])
    results, done = [], [start - 8 * (r > 0) for r in range(6)]
    for position in range(start, tokens):
        mates = torch.randperm(5)[: position % 6].add(1).tolist()
        order = [*mates[1:], 0, *mates[:1]]
        results.append(world.step([Part(r, done[r], 1) for r in order]))
        for r in order:
            done[r] += 1
    expected, rows = alone(family, tokens, 200, tokens)
    rows = [{name: x[start:] for name, x in layer.items()} for layer in rows]
    assert_same_rows(joined(results, 0), rows)
    assert_same_state(world.state(0, tokens), expected.state(0, tokens))


@pytest.mark.case("All lengths zero")
@pytest.mark.parametrize("requests", [1, 32, 33])
@every_family
def test_first_tokens(family, requests):
    """Warm-up: every request has one token. Where none closes an entry, layers see the window."""
    texts = [text_of(family, 1, 300 + r) for r in range(requests)]
    world = world_of(family, texts, 1, 1)
    rows = world.step([Part(r, 0, 1) for r in range(requests)], check=requests == 32)
    plan = PLANS[family]
    for layer, found in zip(plan.layers, rows.layers, strict=True):
        slots = [world.window_slots(r, torch.tensor([0])) for r in range(requests)]
        window = fc.load(world.cache.window[layer.index], torch.cat(slots))
        if layer.ratio != 1:
            probability = (found["lse"] - torch.linspace(-1, 1, plan.heads)).sigmoid()
            want = probability[..., None] * window[:, None].float()
            torch.testing.assert_close(found["out"].float(), want, rtol=2.0**-8, atol=1e-6)
            assert "positions" not in found or (found["positions"] == -1).all()


# ---- Requests that continue


@pytest.mark.parametrize("position", [1000, 65_535, 65_536])
@every_family
def test_continues_at_any_position(family, position):
    """From the tail rows, the window and the entries of a history that is only known by its
    records, here random bytes: cut at the position, beside a request that starts at 0, or in one
    call from a few tokens before."""
    before, after = (37, 31) if position < 10_000 else (9, 12)
    first, end, tokens = position - before, position + after, position + 64
    texts = [text_of(family, 80, 400), text_of(family, 80, 401)]
    options = {"shifts": [first, 0], "held_tokens": tokens, "seed": 5}
    cut = world_of(family, texts, tokens, 80, **options)
    whole = world_of(family, texts, tokens, 80, **options)
    for world in (cut, whole):
        world.fill_randomly(6)
    results = [cut.step([Part(0, first, before)])]
    results += [cut.step([Part(1, 0, 5), Part(0, position, 1, padding=1)], check=True)]
    for start, stop in ((1, 2), (2, 9), (9, 10), (10, after)):
        results.append(cut.step([Part(0, position + start, stop - start), Part(1, 4 + start, 1)]))
    rows = whole.step([Part(0, first, end - first)]).of(0)
    assert_same_rows(joined(results, 0), rows)
    assert_same_state(cut.state(0, end, first=first), whole.state(0, end, first=first))


@every_family
def test_same_content_at_another_position(family):
    """Two requests of one batch with the same tokens, 256 positions apart, and nothing before
    them: unrotated dims of all records are the same bytes, and layers see nearly the same."""
    shift, tokens = 256, 160
    plan = PLANS[family]
    texts = [text_of(family, tokens, 500)] * 2
    world = world_of(family, texts, shift + tokens, tokens, shifts=[0, shift])
    world.pool.reserve(1, shift, tokens)
    for ratio, table in world.pool.block_tables.items():  # entries before the shift: nowhere
        table[1, : shift // ratio // world.stack.spec.page_sizes[ratio]] = -1
    # An overlapping first entry would pool a group that only the second request has.
    stored = [[first // ratio + (ratio == 4) for first in (0, shift)] for ratio in plan.ratios]
    result = world.step(
        [Part(0, 0, tokens), Part(1, shift, tokens)],
        window_first=torch.tensor([0, shift], dtype=torch.int32),
        entry_first=torch.tensor(stored, dtype=torch.int32),
    )
    assert_same_unrotated(
        world.stack.spec,
        plan,
        *(world.state(r, first + tokens, first=first) for r, first in ((1, shift), (0, 0))),
    )
    for layer, got, want in zip(plan.layers, result.of(1), result.of(0), strict=True):
        if layer.contiguous or layer.mode == "window":  # no selection that may differ
            assert difference(got["out"], want["out"]).rel_l2 < 0.05


def assert_same_unrotated(spec: fc.CacheSpec, plan: fc.LayerPlan, got: dict, want: dict) -> None:
    """Codes of the dims before the last 64, and whole tails."""
    for name, rows in got.items():
        kind = name.split()[0]
        if "tail" in name:
            assert_same_bytes(rows, want[name], name)
        elif not (kind == "index" and plan.rotate):  # a Hadamard rotation mixes the dims
            record = fc.RECORDS[getattr(spec, kind)]
            codes = (record.dims - 64) // (2 if record.element == "E2M1" else 1)
            assert len(rows) and codes < rows.shape[1]
            assert_same_bytes(rows[:, :codes], want[name][:, :codes], name)


# ---- Bounded replay and takeover


@pytest.mark.parametrize("replayed", [8, 31, 32, 33, 45])
@every_family
def test_bounded_replay(family, replayed):
    """After a prefix hit the last tokens run again to rebuild windows and open groups. Records of
    complete groups stay, whatever the replay computes for their tokens (here NaN); windows begin
    with the replay; the continuation has the bytes of a run without it."""
    length, more = 133, 20
    end, first = length + more, length - replayed
    plan, text = PLANS[family], text_of(family, end, 600)
    world = world_of(family, [text], end, length)
    original = world.step([Part(0, 0, length)]).of(0)
    records = [pages.data.clone() for pages in world.pages()[: -len(plan.layers)]]
    for pages in world.cache.window:
        pages.data.fill_(0xFF)
    for group, tails in zip(plan.groups, world.cache.tails, strict=True):
        if tails.main and not group.overlap:  # its next entry needs rows of a complete group
            tails.main.rows.fill_(torch.nan)
    stored = torch.tensor([[length // ratio] for ratio in plan.ratios], dtype=torch.int32)
    bounds = {"window_first": torch.tensor([first], dtype=torch.int32), "entry_first": stored}
    world.texts[0] = without_stored(plan, text, length)
    result = world.step([Part(0, first, replayed)], check=True, **bounds).of(0)
    for pages, before in zip(world.pages(), records, strict=False):
        assert_same_bytes(pages.data, before, pages.record)
    for got, want in zip(result, original, strict=True):
        if "positions" in got:
            assert_same_bytes(got["positions"], want["positions"][first:], "positions")
        assert (got["out"][0] != want["out"][first]).any()  # its window is one token
    world.texts[0] = text
    steps = [(0, 1), (1, 4), (4, more)]
    rest = joined([world.step([Part(0, length + a, b - a)], **bounds) for a, b in steps], 0)
    expected, rows = alone(family, end, 600, end)
    assert_same_state(world.state(0, end, first=first), expected.state(0, end, first=first))
    whole = max(first + plan.window - 1 - length, 0)  # from here on the replay covers the window
    for got, want in zip(rest, rows, strict=True):
        for name in got:
            assert_same_bytes(got[name][whole:], want[name][length + whole :], name)
    # Control: nothing but the bound keeps poisoned windows from being read.
    seen = world.step([Part(0, first, 1)], compress=False).of(0)
    assert all(layer["out"].isnan().all() for layer in seen)


def without_stored(plan: fc.LayerPlan, text: Text, length: int) -> Text:
    """The text with NaN for the compressor's inputs of complete groups."""

    def spoilt(ratio: int, x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return None
        stored = length // ratio * ratio
        return torch.cat([torch.full_like(x[:stored], torch.nan), x[stored:]])

    tokens = [
        fc.Tokens(*(spoilt(group.ratio, x) for x in vars(inputs).values()))
        for group, inputs in zip(plan.groups, text.tokens, strict=True)
    ]
    return replace(text, tokens=tokens)


@pytest.mark.case("Prefix reuse")
@pytest.mark.parametrize("length", [255, 256, 257])
@every_family
def test_state_of_a_prefix_is_records_window_and_tail(family, length):
    """A request takes over another's prefix: complete pages are shared, the open page, the window
    and the tail rows are copied. Both go on, with different tokens: as if each had been alone."""
    tokens = length + 130
    text, other = text_of(family, tokens, 700), text_of(family, tokens, 701)
    world = world_of(family, [text, text, text, text], tokens, length)
    world.step([Part(0, 0, length)])
    world.take_over(1, 0, length)
    world.take_over(2, 0, length, tail=False)
    world.take_over(3, 0, length, window=False)
    world.texts[0] = other
    results, start = [], length
    for rows in (1, 64, 65):
        results.append(world.step([Part(r, start, rows) for r in range(4)]))
        start += rows
    expected, rows = alone(family, tokens, 700, tokens)
    rows = [{name: x[length:] for name, x in layer.items()} for layer in rows]
    assert_same_rows(joined(results, 1), rows)
    assert_same_state(world.state(1, tokens), expected.state(0, tokens))
    # Controls: without its window, or without the tail of an open group, it is another request.
    assert not joined(results, 3)[0]["out"].isfinite().all()
    open_groups = [g for g in PLANS[family].groups if length % g.ratio or g.overlap]
    without_tail = world.state(2, tokens)
    for group in PLANS[family].groups:
        name = f"main {group.index}"
        differs = not torch.equal(without_tail[name], expected.state(0, tokens)[name])
        assert differs == (group in open_groups)


# ---- Drafts and entries to come


def mixed(text: Text, draft: Text, length: int) -> Text:
    """The text's first tokens, then the draft's."""

    def both(a, b):
        parts = {
            name: None if x is None else torch.cat([x[:length], vars(b)[name][length:]])
            for name, x in vars(a).items()
        }
        return type(a)(**parts)

    queries = [both(a, b) for a, b in zip(text.queries, draft.queries, strict=True)]
    return Text(queries, [both(a, b) for a, b in zip(text.tokens, draft.tokens, strict=True)])


@pytest.mark.case("Rollback of rejected tokens")
@pytest.mark.parametrize("prefix", [70, 71, 72, 73])
@every_family
def test_rejected_drafts_leave_no_trace(family, prefix):
    """Requests of one batch with 1 to 12 drafts, of which 0 to all are accepted; then 9 true
    tokens: records, windows, tails, selections and outputs of a request that never speculated."""
    tries = [(d, a) for d in (1, 5, 12) for a in sorted({0, 1, d // 2, d})]
    tokens = prefix + 12 + 9
    text, draft = text_of(family, tokens, 800), text_of(family, tokens, 801)
    texts = [mixed(text, draft, prefix + a) for _, a in tries]
    world = world_of(family, texts, tokens, prefix, max_draft=12)
    world.step([Part(r, 0, prefix) for r in range(len(tries))])
    world.step([Part(r, prefix, d) for r, (d, _) in enumerate(tries)])
    world.texts = [text] * len(tries)
    result = world.step([Part(r, prefix + a, 9) for r, (_, a) in enumerate(tries)])
    _, rows = alone(family, tokens, 800, tokens)
    for r, (_, accepted) in enumerate(tries):
        begin, end = prefix + accepted, prefix + accepted + 9
        want = [{name: x[begin:end] for name, x in layer.items()} for layer in rows]
        assert_same_rows(result.of(r), want)
        short = alone(family, tokens, 800, end)[0]
        assert_same_state(world.state(r, end), short.state(0, end))


@pytest.mark.case("Visibility at group edges")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("family, group", [("v41", 0), ("v41", 1), ("v4", 0), ("v4", 1)])
def test_entries_to_come_are_never_seen(family, group, strict):
    """Entries whose last token is still to come, planted with huge keys and values: no bit of a
    selection, a pool or an output changes. One entry earlier everything does (control)."""
    plan, tokens = PLANS[family], 3 * 128
    ratio = plan.groups[group].ratio
    text = text_of(family, tokens, 900)
    positive = [
        replace(q, index_weights=q.index_weights.abs()) if q.index_q is not None else q
        for q in text.queries
    ]
    world = world_of(family, [replace(text, queries=positive)], tokens, tokens)
    world.step([Part(0, 0, tokens)])
    layers = [layer.index for layer in plan.layers if layer.group == group]
    source = positive[layers[0]]
    for p in sorted({0, ratio - 2, ratio - 1, ratio, 2 * ratio - 1, 2 * ratio} - {-1}):

        def seen(p=p) -> list[dict]:
            found = world.step([Part(0, p, 1)], compress=False, strict=strict).of(0)
            return [found[layer] for layer in layers]

        key = None if source.index_q is None else source.index_q[p, 0]
        visible = (p if strict else p + 1) // ratio
        clean = seen()
        with world.planted(group, range(visible, tokens // ratio), key):
            assert_same_rows(seen(), clean)
        if visible > 0:
            with world.planted(group, [visible - 1], key):
                changed = seen()
            assert all((a["out"] != b["out"]).any() for a, b in zip(changed, clean, strict=True))
