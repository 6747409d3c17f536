"""Accuracy: faults in a back end show, and are named by the axis they belong to."""

from dataclasses import replace

import pytest
import torch

from flash_csa import RECORDS
from flash_csa.accuracy import AXES, Activations, Shape, failing_axes, truths
from flash_csa.accuracy.backends import Formula, Stored
from flash_csa.accuracy.case import Case
from flash_csa.accuracy.checks import Check
from flash_csa.accuracy.codecs import AXIS, CODES, FORMATS, READING, SCALES
from flash_csa.accuracy.compiled import CHUNKS, Compiled
from flash_csa.accuracy.formats import INDEX_FP4, INDEX_FP8, MAIN_FP4, MAIN_FP8, MIXED_FP8
from flash_csa.accuracy.stages import compare
from flash_csa.accuracy.synthetic import heavy

SHAPE = Shape(layers=2, heads=4, index_heads=8, rows=16)


def stages(backend: Formula) -> list[Check]:
    return compare(Case(heavy(1024, SHAPE, 0), 128, backend))


class Stores(Formula):
    """A fault in records of `dims` values."""

    def __init__(self, dims: int, fault) -> None:
        self.dims, self.fault = dims, fault

    def store(self, rows, variant):
        made = super().store(rows, variant)
        wrong = rows.shape[1] == self.dims and variant.element == "E2M1"
        return replace(made, values=self.fault(made.values)) if wrong else made


def shift_scale(values):
    """One group has its neighbour's scale: half of it."""
    values = values.clone()
    values[:, 16:32] /= 2
    return values


def swap_nibbles(values):
    return values.unflatten(1, (-1, 2)).flip(2).flatten(1)


def lose_sign_of_a_lane(values):
    values = values.clone()
    values[:, 7] = values[:, 7].abs()
    return values


class Query(Formula):
    def query(self, index_q, where, cos_sin, variant):
        return Stored(variant.round_trip(index_q), variant)  # not rotated


class NoRelu(Formula):
    def scores(self, query, keys, weights, where):
        rows = [w @ (q @ keys.values.T) for q, w in zip(query.values, weights, strict=True)]
        return torch.stack(rows)


class LosesAHead(Formula):
    def scores(self, query, keys, weights, where):
        return super().scores(query, keys, weights * (torch.arange(weights.shape[1]) > 0), where)


class TruncatedPool(Formula):
    def pool(self, scores, where, blocks, block):
        made = super().pool(scores, where, blocks, block)
        return torch.where(torch.arange(blocks) < blocks - 1, made, -1)


class ForgetsTheNewestBlock(Formula):
    def pool(self, scores, where, blocks, block):
        hidden = torch.arange(scores.shape[1]) >= (where.n_vis[:, None] - 1) // block * block
        made = super().pool(torch.where(hidden, -torch.inf, scores), where, blocks + 1, block)
        newest = (where.n_vis - 1)[:, None] // block
        return torch.where(made == newest, -1, made)[:, :blocks]


class SeesOneMore(Formula):
    def select(self, scores, where, k, pool=None, block=0):
        return super().select(scores, replace(where, positions=where.positions + 1), k, pool, block)


class LeavesThePool(Formula):
    def select(self, scores, where, k, pool=None, block=0):
        return super().select(scores, where, k)


class Stale(Formula):
    """A Reuse layer reads the selection of the step before."""

    def __init__(self) -> None:
        self.before = None

    def reuse(self, selection):
        stale, self.before = self.before, selection
        return selection if stale is None or stale.shape != selection.shape else stale


class SwapsAPage(Formula):
    """Records of two pages change places where attention reads them."""

    def attend(self, q, main, lists, window, window_lists, sink):
        values = main.values.clone()
        values[0:64], values[64:128] = main.values[64:128], main.values[0:64]
        return super().attend(q, replace(main, values=values), lists, window, window_lists, sink)


class DropsTheSink(Formula):
    def attend(self, q, main, lists, window, window_lists, sink):
        return super().attend(q, main, lists, window, window_lists, sink - 1e9)


class ShortWindow(Formula):
    def attend(self, q, main, lists, window, window_lists, sink):
        return super().attend(q, main, lists, window, window_lists[:, 1:], sink)


class WrongWindow(Formula):
    def store(self, rows, variant):
        made = super().store(rows, variant)
        fault = rows.shape[1] == 512 and variant.element == "E4M3" and not variant.kept
        return replace(made, values=made.values.roll(1, 0)) if fault else made


FAULTS = {
    "main scale shifted": (Stores(512, shift_scale), "main KV"),
    "main nibbles swapped": (Stores(512, swap_nibbles), "main KV"),
    "main sign lost": (Stores(512, lose_sign_of_a_lane), "main KV"),
    "index scale shifted": (Stores(128, shift_scale), "index keys"),
    "index nibbles swapped": (Stores(128, swap_nibbles), "index keys"),
    "query not rotated": (Query(), "index queries"),
    "no ReLU": (NoRelu(), "index scores"),
    "a head is lost": (LosesAHead(), "index scores"),
    "pool truncated": (TruncatedPool(), "pool"),
    "newest block forgotten": (ForgetsTheNewestBlock(), "pool"),
    "one entry too many seen": (SeesOneMore(), "selection"),
    "selects outside the pool": (LeavesThePool(), "reindex"),
    "stale selection": (Stale(), "reuse"),
    "one page swapped": (SwapsAPage(), "attention"),
    "sink dropped": (DropsTheSink(), "attention"),
    "window one short": (ShortWindow(), "attention"),
    "window of neighbours": (WrongWindow(), "window KV"),
}


def faulty(**faults) -> Compiled:
    """The ops, with a fault in what some methods return."""

    def changed(name, fault):
        def method(self, *args, **options):
            return fault(getattr(Compiled, name)(self, *args, **options))

        return method

    backend = type("Faulty", (Compiled,), {n: changed(n, f) for n, f in faults.items()})
    backend.outputs = lambda self: {"BF16": backend(), "FP32": backend(torch.float32)}
    return backend()


def values(fault, variant=None):
    """In stored values, or in those of one variant."""

    def change(made):
        wrong = variant is None or made.variant == variant
        return replace(made, values=fault(made.values)) if wrong else made

    return change


def first_of(fault):
    return lambda made: (fault(made[0]), *made[1:])


def second_of(fault):
    return lambda made: (made[0], fault(made[1]), *made[2:])


def lose_the_oldest(lists):
    return torch.cat([torch.full_like(lists[:, :1], -1), lists[:, 1:]], 1)


def late(made):
    return made.roll(1, 0)


def by_rows(parts):
    """[W, Q, n] read as [Q, W, n]."""
    return parts.reshape(parts.shape[1], len(parts), -1).transpose(0, 1).contiguous()


class ReadsShardsByRows(Compiled):
    def merge_selections(self, lists, scores, *args):
        return super().merge_selections(by_rows(lists), by_rows(scores), *args)


class ReadsPoolsByRows(Compiled):
    def merge_pools(self, blocks, scores, *args):
        return super().merge_pools(by_rows(blocks), by_rows(scores), *args)


class CountsTheSink(Compiled):
    """In the log of the denominator of a merge."""

    def outputs(self):
        return {"BF16": CountsTheSink(), "FP32": CountsTheSink(torch.float32)}

    def merge(self, parts, sink):
        out, lse = super().merge(parts, sink)
        return out, torch.logaddexp(lse, sink.expand_as(lse))


class KeepsAnEmptyBlock(Compiled):
    """Of foreign lists, the block after the last that a row sees whole."""

    def normalize_pool(self, blocks, where, entries):
        whole = where.n_vis % 8 == 0
        later = replace(where, positions=where.positions + whole)
        return super().normalize_pool(blocks, later, entries)


class NotStrict(Compiled):
    def _scores(self, query, keys, weights, where, pool=None):
        return super()._scores(query, keys, weights, replace(where, strict=False), pool)

    def index_select(self, query, keys, weights, where, k, **options):
        where = replace(where, strict=False)
        return super().index_select(query, keys, weights, where, k, **options)


class SelectsNotStrict(Compiled):
    def select(self, scores, where, *args):
        return super().select(scores, replace(where, strict=False), *args)


class PagesOf64(Compiled):
    """In the slots of a selection, whatever the pages are."""

    def _select(self, scores, rows, k, **pool):
        made, built = super()._select(scores, rows, k, **pool)
        page = rows.table[(made.positions.clamp(min=0) // 64).clamp(max=len(rows.table) - 1)]
        slots = page * 64 + made.positions % 64
        return replace(made, slots=torch.where(made.positions < 0, -1, slots).int()), built


class PayloadStride(Compiled):
    """Records are read as if pages had no bytes between them."""

    def store_apart(self, rows, variant):
        made = super().store_apart(rows, variant)
        pages = made.held.pages
        packed = pages.data.as_strided(pages.data.shape, (pages.data.shape[1], 1))
        wrong = replace(made.held, pages=replace(pages, data=packed))
        return wrong.read(len(rows), variant)


def worse(outs):
    return [out * 1.1 for out in outs]


class SeesOneLess(Compiled):
    """Scoring and selecting hide the newest entry; the step does not."""

    def _scores(self, query, keys, weights, where, pool=None):
        return super()._scores(query, keys, weights, before(where), pool)

    def index_select(self, query, keys, weights, where, k, **options):
        return super().index_select(query, keys, weights, before(where), k, **options)

    def select(self, scores, where, k, pool=None, block=0):
        return super().select(scores, before(where), k, pool, block)


def before(where):
    return replace(where, positions=(where.positions - where.ratio).clamp(min=0))


class TurnsTooFar(Compiled):
    """One position, with whatever is rotated."""

    def rope_store(self, q, kv, positions, cos_sin, *rest, **options):
        return super().rope_store(q, kv, positions, cos_sin.roll(-1, 0), *rest, **options)

    def query(self, index_q, where, cos_sin, variant, rotate=False):
        return super().query(index_q, where, cos_sin.roll(-1, 0), variant, rotate)

    def compress(self, inputs, ratio, cos_sin, *rest, **options):
        return super().compress(inputs, ratio, cos_sin.roll(-1, 0), *rest, **options)


class WritesBytes(Compiled):
    """A fault in the bytes of some records: of codes ("data") or scales."""

    def __init__(self, fault, *parts, out=torch.bfloat16) -> None:
        super().__init__(out)
        self.fault, self.parts = fault, parts

    def bytes_of(self, stored):
        made, size = super().bytes_of(stored), RECORDS[stored.variant.record].data_bytes
        for part, columns in (("data", slice(0, size)), ("scales", slice(size, None))):
            if (stored.variant, part) in self.parts:
                made[:, columns] = self.fault(made[:, columns])
        return made


class LosesATail(Compiled):
    """The first record of a chunk is that of its own rows alone."""

    def compress(self, inputs, *args, chunks=CHUNKS):
        made = super().compress(inputs, *args, chunks=chunks)
        if chunks != CHUNKS:
            return made
        values = made[0].values.clone()
        values[sum(CHUNKS) // args[0] - 1] *= 0.99
        return replace(made[0], values=values), made[1]


class WrongInChunks(Compiled):
    """Rows of one request share the first one's scores."""

    def _scores(self, query, keys, weights, where, pool=None):
        made = super()._scores(query, keys, weights, where, pool)
        follow = torch.nn.functional.pad(where.positions.diff() == 1, (1, 0))
        return torch.where(follow[:, None], made.roll(1, 0), made)


class ForgetsThePool(Compiled):
    """A group's Reindex layers score everything."""

    def group(self, inputs, k, pool_blocks, cos_sin):
        return super().group(inputs, k, -(-inputs.tokens // 8), cos_sin)


class TiesHigher(Compiled):
    """Equal scores and blocks are taken from the end."""

    def pool(self, scores, where, blocks, block):
        return super().pool(later_first(scores), where, blocks, block)

    def select(self, scores, where, k, *rest):
        return super().select(later_first(scores), where, k, *rest)


def later_first(scores):
    return scores + torch.arange(scores.shape[1]) * 1e-4


class WrongLayers(Compiled):
    """What layers of one mode attend is of the row before."""

    def __init__(self, mode="reuse") -> None:
        super().__init__()
        self.mode = mode

    def group(self, inputs, *args):
        outs = super().group(inputs, *args)
        return [late(o) if m == self.mode else o for o, m in zip(outs, inputs.modes, strict=True)]


class NoBias(Compiled):
    def compress(self, inputs, *args, **options):
        biased = vars(inputs)
        return super().compress(Activations(**biased), *args, **options)


def lengthen(selection):
    return replace(selection, lengths=(selection.lengths + 1).clamp(max=selection.slots.shape[1]))


def flip_last_bit(made):
    return made ^ 1


def swap_halves(made):
    return (made << 4) | (made >> 4)


shifted = values(shift_scale, MAIN_FP4)
KERNEL_FAULTS = {
    "window list one short": (faulty(step=first_of(lose_the_oldest)), "visibility and slots"),
    "closing token does not see its entry": (
        faulty(step=lambda made: (*made[:2], made[2] - 1)),
        "visibility and slots",
    ),
    "pooled from a neighbour": (
        faulty(compress=lambda made: tuple(values(late)(each) for each in made)),
        "compression",
    ),
    "rotated to another position": (faulty(compress=first_of(values(late))), "compression"),
    "index key without its norm": (
        faulty(compress=second_of(values(lambda x: 2 * x))),
        "index keys",
    ),
    "main scale shifted, wherever it is encoded": (
        faulty(store=shifted, compress=first_of(shifted)),
        "main KV",
    ),
    "main nibbles swapped, by encoder and decoder": (
        faulty(bytes_of=swap_halves),
        "main KV",
    ),
    "window not rotated": (faulty(rope_store=second_of(values(late))), "window KV"),
    "right positions, slots of another row": (
        faulty(_select=first_of(lambda lists: replace(lists, slots=late(lists.slots)))),
        "selection",
    ),
    "pool built otherwise while scoring": (
        faulty(index_select=lambda made: (made[0], None if made[1] is None else late(made[1]))),
        "pool",
    ),
    "a pool's scores by another page": (faulty(scores_inside=late), "reindex"),
    "sink dropped in a merge": (faulty(merge=first_of(lambda out: 2 * out)), "attention"),
    "output turned back too far": (faulty(attend_back=late), "attention"),
    "a page swapped, in the group too": (faulty(attend=late, group=worse), "attention"),
    "a group that stages do not explain": (faulty(group=worse), "group"),
    "newest entry hidden from scores and selection": (SeesOneLess(), "visibility and slots"),
    "everything turned too far": (TurnsTooFar(), "RoPE of queries, window and index"),
    "last bit of E4M3 flipped": (
        WritesBytes(
            flip_last_bit,
            (MAIN_FP4, "scales"),
            *((v, "data") for v in (MAIN_FP8, MIXED_FP8, INDEX_FP8)),
        ),
        "E4M3 of main and window KV",
    ),
    "nibbles swapped, in both FP4 records": (
        WritesBytes(swap_halves, (MAIN_FP4, "data"), (INDEX_FP4, "data")),
        "E2M1 of main KV and index",
    ),
    "codes of both FP8 records of 512": (
        WritesBytes(flip_last_bit, (MAIN_FP8, "data"), (MIXED_FP8, "data")),
        "window KV",
    ),
    "codes of the window": (WritesBytes(flip_last_bit, (MAIN_FP8, "data")), "window KV"),
    "codes of V4's record": (WritesBytes(flip_last_bit, (MIXED_FP8, "data")), "main KV of V4"),
    "scales of the window": (WritesBytes(flip_last_bit, (MAIN_FP8, "scales")), "window KV"),
    "scales of main KV": (WritesBytes(flip_last_bit, (MAIN_FP4, "scales")), "main KV"),
    "a tail forgotten": (LosesATail(), "compression"),
    "position bias forgotten": (NoBias(), "compression"),
    "scores of a chunk's first row": (WrongInChunks(), "index scores"),
    "ties to the higher position": (TiesHigher(), "top-k of pool and selection"),
    "a length too many": (faulty(_select=first_of(lengthen)), "selection"),
    "a Reindex layer leaves the pool, in the group": (ForgetsThePool(), "reindex in a group"),
    "a Reuse layer attends another row's list, in the group": (WrongLayers(), "reuse in a group"),
    "Hadamard forgotten": (
        faulty(compress_index=values(lambda x: x.roll(1, 1))),
        "index keys",
    ),
    "the log of a merge counts the sink": (CountsTheSink(), "attention"),
    "an empty block of a foreign list kept": (KeepsAnEmptyBlock(), "pool"),
    "selections of shards by rows": (ReadsShardsByRows(), "selection"),
    "pools of shards by rows": (ReadsPoolsByRows(), "pool"),
    "page size of 64 in slots": (PagesOf64(), "selection"),
    "strict dropped by scoring and selection": (NotStrict(), "visibility and slots"),
    "strict dropped by selection of scores": (SelectsNotStrict(), "selection"),
    "strict dropped by a step": (
        type("Lax", (Compiled,), {"step": lambda s, p, r, strict=False: Compiled.step(s, p, r)})(),
        "visibility and slots",
    ),
    "stride of pages ignored": (PayloadStride(), "main KV"),
    "HCA attends another row's entries": (faulty(attend_visible=late), "attention"),
}


@pytest.mark.parametrize("name", FAULTS | KERNEL_FAULTS)
def test_a_fault_is_named_by_its_axis(name):
    backend, axis = (FAULTS | KERNEL_FAULTS)[name]
    checks = stages(backend)
    assert failing_axes(checks)[:1] == [axis], [c for c in checks if not c.holds]


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.axis)
def test_a_format_is_at_fault_where_all_that_uses_it_is_wrong_and_nothing_else(format):
    for shown in (format.writes, format.reads):
        parts = {(v, p): 0.0 for v in AXIS for p in (SCALES, CODES, READING)}
        parts |= dict.fromkeys(shown, 0.5)
        assert format.wrong(parts) == 0.5
        assert [each.axis for each in FORMATS if each.wrong(parts) > 0] == [format.axis]
        assert format.wrong(parts | {shown[0]: 0.0}) == 0.0
        assert format.wrong(dict.fromkeys(parts, 0.5)) == 0.0


def test_attention_that_is_nan_is_attention():
    broken = faulty(attend=lambda out: out * torch.nan)
    assert failing_axes(truths.check(broken, 0, "cpu")) == ["attention"]


@pytest.mark.parametrize("backend", [Formula(), Compiled()], ids=lambda b: b.name)
def test_sound_back_ends_pass_every_stage(backend):
    checks = stages(backend)
    assert failing_axes(checks) == [], [c for c in checks if not c.holds]
    if backend.name == "compiled":
        assert {c.axis for c in checks} == set(AXES)


def test_known_truths():
    checks = truths.check(Formula(), 0, "cpu")
    assert [c for c in checks if not c.holds] == []
    by_name = {c.name: c.value for c in checks}
    changed = [value for name, value in by_name.items() if "changes" in name]
    assert 0.003 <= changed[0] <= 0.007 < changed[1]  # BF16 rounding of scores, then FP4


@pytest.mark.parametrize(
    "fault", ["main scale shifted", "index nibbles swapped", "pool truncated", "stale selection"]
)
def test_truths_see_faults_without_a_sound_back_end_to_compare_with(fault):
    backend, axis = FAULTS[fault]
    assert axis in failing_axes(truths.check(backend, 0, "cpu"))


def test_checks():
    check = Check("pool", "x", float("nan"), 0.0, 1.0, 1, "")
    assert not check.holds
    with pytest.raises(ValueError, match="axis must be one of"):
        Check("polo", "x", 0.0, 0.0, 1.0, 1, "")
