"""merge: partial results against the whole, empty parts, sinks, rotation."""

import math

import pytest
import torch

import flash_csa
import golden
from attend_data import assert_close, column_parts, random_case, run, same
from flash_csa.reference import attend as reference
from reference_data import RATIOS, STACKS, randn, same_bits, table, tensor


def merged(outs, lses, device, *, dtype=None, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """flash_csa.merge into poisoned results, on the CPU again."""
    dtype = dtype or outs.dtype
    out = torch.full(outs.shape[1:], torch.nan, dtype=dtype, device=device)
    lse = torch.full(lses.shape[1:], torch.nan, device=device)
    flash_csa.merge(outs.to(device), lses.to(device), out=out, lse=lse, **options)
    return out.cpu(), lse.cpu()


@pytest.mark.case("LSE base and merge")
def test_two_and_eight(device):
    outs = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 1, 1, 512).contiguous()
    lses = torch.tensor([2.0, 8.0]).log().view(2, 1, 1)
    out, lse = merged(outs, lses, device)
    torch.testing.assert_close(out, torch.full((1, 1, 512), 0.8), rtol=0, atol=1e-6)
    assert float(lse) == pytest.approx(math.log(10), abs=1e-6)
    sink = torch.tensor([math.log(10)])
    halved, same_lse = merged(outs, lses, device, sink=sink.to(device))
    torch.testing.assert_close(halved, out / 2, rtol=0, atol=1e-6)
    assert torch.equal(same_lse, lse)


@pytest.mark.case("LSE base and merge")
@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_equals_whole(parts, dtype, device):
    """The sink enters once, after the merge, however many parts there are."""
    case = random_case(heads=6, lengths=[210, 64, 1, 0], window_lengths=[128, 3, 0, 0], width=210)
    partial = [run(part, device, dtype=dtype) for part in column_parts(case, parts)]
    outs, lses = (torch.stack(x) for x in zip(*partial, strict=True))
    records, lists = case.reference_lists()
    _, expected_lse = reference.attend(case.q, records, lists)
    sink = case.sink.to(device)
    out, lse = merged(outs, lses, device, sink=sink)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)
    expected, _ = reference.merge(outs, lses, case.sink)
    grain = 2.0**-20 if dtype == torch.float32 else 2.0**-8
    assert ((out - expected).abs() <= grain * outs.abs().sum(0) + 1e-6).all()
    if dtype == torch.float32:
        whole, _ = run(case, device)
        torch.testing.assert_close(out, whole, rtol=1e-5, atol=2e-6)
        assert_close(case, merged(outs, lses, device, dtype=torch.bfloat16, sink=sink)[0], lse)


@pytest.mark.case("LSE base and merge")
@pytest.mark.parametrize("empty", [math.inf, -math.inf])
def test_empty_parts_are_not_read(empty, device):
    outs, lses = randn(3, 2, 2, 512, dtype=torch.float32), randn(3, 2, 2, dtype=torch.float32)
    kept = merged(outs[1:2], lses[1:2], device)
    outs[0], lses[0] = torch.nan, empty
    outs[2], lses[2] = torch.inf, empty
    assert same(merged(outs, lses, device), kept)
    assert same_bits(kept[0], outs[1]) and torch.equal(kept[1], lses[1])
    lses[1, 0, 1] = empty
    out, lse = merged(outs, lses, device, sink=torch.zeros(2, device=device))
    assert (out[0, 1] == 0).all() and lse[0, 1] == math.inf
    assert out[0, 0].abs().sum() > 0 and lse[0, 0].isfinite()


def test_no_parts(device):
    out, lse = merged(torch.empty(0, 2, 1, 512), torch.empty(0, 2, 1), device)
    assert (out == 0).all() and (lse == math.inf).all()


@pytest.mark.parametrize("spread", [1.0, 100.0, 1e4])
def test_distant_parts(spread, device):
    outs, lses = randn(5, 3, 2, 512, dtype=torch.float32), randn(5, 3, 2, dtype=torch.float32)
    lses *= spread
    sink = torch.tensor([80.0, -80.0])
    out, lse = merged(outs, lses, device, sink=sink.to(device))
    expected, expected_lse = reference.merge(outs, lses, sink)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-7, atol=1e-6)


def test_infinite_sinks(device):
    outs, lses = randn(2, 3, 2, 512, dtype=torch.float32), randn(2, 3, 2, dtype=torch.float32)
    plain, plain_lse = merged(outs, lses, device)
    sink = torch.tensor([torch.inf, -torch.inf], device=device)
    out, lse = merged(outs, lses, device, sink=sink)
    assert (out[:, 0] == 0).all() and torch.equal(out[:, 1], plain[:, 1])
    assert torch.equal(lse, plain_lse)


@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("name", STACKS)
def test_golden_rotation_is_exact(name, layer, device):
    """One part without a sink passes through, so only rounding and rotation are left."""
    archive = golden.load(name)
    outs = tensor(archive, f"L{layer}.attend_out_fp32")[None]
    lses = tensor(archive, f"L{layer}.attend_lse")[None]
    positions = tensor(archive, "rows").int().to(device)
    derotate = (positions, table(300, RATIOS[layer]).to(device))
    expected = tensor(archive, f"L{layer}.attend_out_derotated")
    for dtype in (torch.bfloat16, torch.float32):
        out, lse = merged(outs, lses, device, dtype=dtype, derotate=derotate)
        assert same_bits(out.bfloat16(), expected) and torch.equal(lse, lses[0])
        assert torch.equal(out, out.bfloat16().to(dtype))
    plain, _ = merged(outs, lses, device)
    assert same_bits(plain, outs[0])


@pytest.mark.case("Padded query rows")
def test_padded_rows(device):
    outs, lses = randn(2, 4, 2, 512), randn(2, 4, 2, dtype=torch.float32)
    positions = torch.tensor([3, -1, 5, 1 << 20], dtype=torch.int32)
    outs[:, 1] = lses[:, 1] = torch.nan
    derotate = (positions.to(device), table(8).to(device))
    out, lse = merged(outs, lses, device, derotate=derotate)
    assert (out[[1, 3]] == 0).all() and (lse[[1, 3]] == math.inf).all()
    assert out[[0, 2]].isfinite().all() and lse[[0, 2]].isfinite().all()


def test_levels_and_reruns_agree(cpu_level):
    outs, lses = randn(3, 5, 3, 512), randn(3, 5, 3, dtype=torch.float32)
    results = [merged(outs, lses, "cpu", sink=torch.zeros(3)) for _ in range(20)]
    flash_csa._C.set_cpu_level("baseline")
    baseline = merged(outs, lses, "cpu", sink=torch.zeros(3))
    assert all(same(result, baseline) for result in results)


def test_strided_output_in_guard_bands(device):
    outs, lses = randn(2, 3, 4, 512), randn(2, 3, 4, dtype=torch.float32)
    results = torch.full((5, 6, 768), torch.nan, device=device)
    out = results[1:4, 1:5, 128:640]
    flash_csa.merge(outs.to(device), lses.to(device), out=out)
    assert torch.equal(out.cpu(), merged(outs, lses, device, dtype=torch.float32)[0])
    assert results.isnan().sum() == results.numel() - out.numel()
