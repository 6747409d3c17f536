"""attend gives the same bits again: in reruns, beside any rows, on any threads, at any level."""

from dataclasses import replace

import pytest
import torch

import flash_csa
from attend_data import assert_close, bound_call, random_case, run, same, spread
from flash_csa import _C
from reference_data import same_bits, table


@pytest.mark.case("Self-consistency")
def test_reruns(device):
    case = random_case(heads=5, lengths=[250] * 129, window_lengths=[100] * 129, entries=410)
    first = run(case, device)
    for _ in range(20):
        assert same(run(case, device), first)


@pytest.mark.case("Batch invariance")
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_batch_mates(batch_invariant, device):
    case = random_case(heads=3, lengths=[233, *torch.randint(0, 250, (127,)).tolist()],
                       window_lengths=[128] * 128)  # fmt: skip
    options = {"batch_invariant": batch_invariant, "dtype": torch.bfloat16}
    alone, lse = run(case.rows(slice(0, 1)), device, **options)
    spread_alone = spread(case.rows(slice(0, 1)))  # what cancels is rounded where it is cut
    for rows in (2, 32, 128):
        out, lses = run(case.rows(slice(0, rows)), device, **options)
        if batch_invariant or device.type == "cpu":
            assert torch.equal(out[:1], alone) and torch.equal(lses[:1], lse)
        assert ((out[:1] - alone).abs() <= 2.0**-7 * (spread_alone + alone.abs())).all()
    if batch_invariant or device.type == "cpu":
        order = torch.randperm(128)
        whole = run(case, device, **options)
        assert same(run(case.rows(order), device, **options), [x[order] for x in whole])


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_queries_that_the_attend_before_wrote(heads, cuda):
    """The first row of either call has nearly all of the records, so that other blocks have ended
    when it is written; then it is the first that is asked for."""
    rows = torch.cuda.get_device_properties(cuda).multi_processor_count
    lengths = [8000] + [1] * (rows - 1)
    case = random_case(heads=heads, lengths=lengths, window_lengths=[1] * rows, width=8000)
    before, q, _ = bound_call(case, cuda, dtype=torch.bfloat16)
    call, out, lse = bound_call(replace(case, q=q), cuda, dtype=torch.bfloat16)
    before()
    torch.cuda.synchronize()
    call()
    expected = out.cpu(), lse.cpu()
    assert all(x.isfinite().all() for x in expected)
    for _ in range(3):
        for x in (q, out, lse):
            x.fill_(torch.nan)
        torch.cuda.synchronize()
        before()
        call()
        assert same((out.cpu(), lse.cpu()), expected)


@pytest.mark.parametrize("records", ["FP4 and FP8", "MixedFp8"])
@pytest.mark.parametrize(("rows", "heads"), [(140, 128), (70, 100), (70, 256), (3, 192)])
def test_blocks_of_heads_alone(rows, heads, records, device):
    """Blocks of heads that share the conversion of records have the bits that they have alone."""
    lengths = [(512, 64, 1, 0, 300, 65, 511, 33)[i % 8] for i in range(rows)]
    windows = [(128, 1, 0, 0, 40, 127, 64)[i % 7] for i in range(rows)]
    lists = {"lengths": lengths, "window_lengths": windows}
    if records == "MixedFp8":
        lists |= {"main": ("MixedFp8", 64), "window": ("MixedFp8", 64)}
    case = random_case(heads=heads, width=512, **lists)
    case.selection.slots[torch.rand(case.selection.slots.shape) < 0.1] = -1
    options = {"dtype": torch.bfloat16, "batch_invariant": True}
    out, lse = run(case, device, **options)
    for first in range(0, heads, 64):
        block = slice(first, first + 64)
        alone = replace(case, q=case.q[:, block], sink=case.sink[block].clone())
        assert same(run(alone, device, **options), (out[:, block], lse[:, block]))
    for _ in range(3):
        assert same(run(case, device, **options), (out, lse))


@pytest.mark.parametrize("records", ["FP4 and FP8", "MixedFp8"])
@pytest.mark.parametrize("heads", [40, 64])
@pytest.mark.parametrize("turned", [False, True])
def test_rows_of_a_long_batch(turned, heads, records, device):
    """Where each SM has many rows they have the bits that they have in a short batch."""
    rows = 17 * flash_csa.default_num_sms(device) + 5 if device.type == "cuda" else 40
    lengths = [(192, 0, 64, 1, 0, 70, 130)[i % 7] for i in range(rows)]
    windows = [(128, 128, 0, 1, 0, 0, 100, 64, 0)[i % 9] for i in range(rows)]
    lists = {"lengths": lengths, "window_lengths": windows}
    if records == "MixedFp8":
        lists |= {"main": ("MixedFp8", 64), "window": ("MixedFp8", 64)}
    case = random_case(heads=heads, width=192, **lists)
    case.selection.slots[torch.rand(case.selection.slots.shape) < 0.1] = -1
    positions, cos_sin = torch.randint(256, (rows,), dtype=torch.int32), table(256)

    def results(some):
        options = {"dtype": torch.bfloat16, "batch_invariant": True}
        if turned:
            options["derotate"] = (positions[some].to(device), cos_sin.to(device))
        return run(case.rows(some), device, **options)

    whole = results(slice(None))
    count = min(149, rows // 2)
    for first in (0, rows // 3, rows - count):
        some = slice(first, first + count)
        assert same(results(some), [x[some] for x in whole])
    assert same(results(slice(None)), whole)


@pytest.mark.parametrize("lengths", [(0,), (1,), (0, 0, 65, 1, 1)])
def test_short_rows_of_many_heads(lengths, device):
    """Two blocks of heads go through rows of one tile or none together."""
    cycle = [lengths[i % len(lengths)] for i in range(540)]
    case = random_case(heads=128, lengths=cycle, window=None, width=80)
    results = run(case, device, dtype=torch.bfloat16)
    alone = replace(case, q=case.q[:, 64:], sink=case.sink[64:].clone())
    assert same(run(alone, device, dtype=torch.bfloat16), [x[:, 64:] for x in results])
    assert same(run(case, device, dtype=torch.bfloat16), results)


def test_threads_do_not_matter():
    """Heads of one row may be cut between threads, rows between heads."""
    before = torch.get_num_threads()
    for rows, heads in ((1, 64), (3, 100), (9, 64)):
        case = random_case(heads=heads, lengths=[200] * rows, window_lengths=[50] * rows)
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(case))
        torch.set_num_threads(before)
        assert same(results[0], results[1]) and same(results[0], results[2])


@pytest.mark.parametrize("records", [("MainFp4", "WindowFp8"), ("MixedFp8", "MixedFp8")])
@pytest.mark.parametrize("heads", [3, 33, 70])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_levels_agree(records, heads, size, cpu_level):
    case = random_case(heads=heads, lengths=[90, 5], window_lengths=[20, 5],
                       main=(records[0], 16), window=(records[1], 16))  # fmt: skip
    case = replace(case, q=(case.q * size).bfloat16())  # 30: weights underflow
    for dtype in (torch.float32, torch.bfloat16):
        _C.set_cpu_level(cpu_level)
        at_level = run(case, dtype=dtype)
        assert_close(case, *at_level)
        _C.set_cpu_level("baseline")
        assert same(run(case, dtype=dtype), at_level)


@pytest.mark.parametrize("record", ["WindowFp8", "MixedFp8"])
def test_levels_agree_on_any_bytes(record, cpu_level):
    """Scales from 2^-127 to NaN; where a result is NaN, its bits are the same too."""
    case = random_case(heads=16, main=(record, 16), window=None, entries=60)
    case.main.data.random_(0, 256)
    at_level = run(case, dtype=torch.bfloat16)
    _C.set_cpu_level("baseline")
    assert all(map(same_bits, run(case, dtype=torch.bfloat16), at_level))
