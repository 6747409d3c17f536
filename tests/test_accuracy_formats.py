"""Accuracy: record variants have their bytes and values, and errors that theory foretells."""

import math

import pytest
import torch

from flash_csa import RECORDS
from flash_csa.accuracy import formats, stats
from flash_csa.accuracy.analytic import expected_error
from flash_csa.accuracy.formats import BF16_MAIN, DSA_MAIN, Variant, of_record
from flash_csa.reference.quant import quantize_dequantize

BYTES = {
    Variant("BF16"): 1024,
    Variant("E4M3", "UE8M0", 32): 528,
    Variant("E4M3", "UE8M0", 16): 544,
    Variant("E4M3", "UE8M0", 64, 64): 584,
    Variant("E2M1", "E4M3", 16): 288,
    Variant("E2M1", "E4M3", 32): 272,
    Variant("E2M1", "UE8M0", 32): 272,
    Variant("E2M1", "E4M3", 16, 64): 224 + 28 + 128,
    Variant("E4M3", "E4M3", 32, 64): 448 + 14 + 128 + 2,  # up to a word
    Variant("E2M1", "UE8M0", 32, dims=128): 68,
    Variant("E4M3", "FP32", 128, dims=128): 132,
    DSA_MAIN: 656,
}


@pytest.mark.parametrize("variant", BYTES, ids=lambda v: v.name)
def test_bytes(variant):
    assert variant.bytes == BYTES[variant]


def test_the_published_records_are_among_the_variants():
    for name, record in RECORDS.items():
        assert of_record(name).bytes == record.bytes and of_record(name).record == name
    mains = {variant.record for variant in formats.MAIN_VARIANTS}
    assert mains >= {"MainFp4", "WindowFp8", "MixedFp8"}
    names = [variant.name for variant in formats.MAIN_VARIANTS]
    assert len(set(names)) == len(names)
    assert DSA_MAIN.record is None


@pytest.mark.parametrize("name", RECORDS)
def test_values_are_those_of_the_reference(name):
    """Bit for bit, from subnormal to saturating rows, zeros and ties."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(2000, RECORDS[name].dims, generator=random)
    rows = (rows * (12 * torch.randn(2000, 1, generator=random)).exp2()).bfloat16()
    rows[0], rows[1], rows[2] = 0.0, -0.0, 3000.0
    rows[3] = torch.tensor([0.25, 0.75, 1.25, 6.0]).repeat(len(rows[3]) // 4)
    made = of_record(name).round_trip(rows)
    assert torch.equal(made, quantize_dequantize(rows, name))


def error_of(variant: Variant) -> float:
    x = torch.randn(4096, 512, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    return float((variant.round_trip(x) - x).norm() / x.norm())


@pytest.mark.parametrize(
    "variant",
    [
        Variant("E2M1", "E4M3", 16),
        Variant("E2M1", "E4M3", 32),
        Variant("E2M1", "UE8M0", 16),
        Variant("E2M1", "UE8M0", 32),
        Variant("E4M3", "UE8M0", 32),
    ],
    ids=lambda v: v.name,
)
def test_error_of_normal_values_is_the_analytic_one(variant):
    assert error_of(variant) == pytest.approx(expected_error(variant), rel=5e-3)


def test_analytic_error_of_a_plain_rounding():
    """A large group of E2M1 with a scale of 1 near its largest value: known cells of the grid."""
    x = torch.linspace(-6, 6, 240_001, dtype=torch.float64)
    density = torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    wrong = (formats.round_element(x.float(), "E2M1").double() - x) ** 2
    numeric = float(torch.trapezoid(wrong * density, x))
    from flash_csa.accuracy.analytic import _cells

    one = torch.tensor([6.0], dtype=torch.float64)
    assert float(_cells(one, torch.ones_like(one), "E2M1")) == pytest.approx(numeric, rel=1e-4)


def test_errors_are_ordered():
    """Fewer bits, wider groups and coarser scales lose more; BF16 nothing."""
    assert error_of(BF16_MAIN) == 0
    ordered = [
        Variant("E4M3", "UE8M0", 32),
        Variant("E2M1", "E4M3", 16),
        Variant("E2M1", "E4M3", 32),
        Variant("E2M1", "UE8M0", 32),
    ]
    errors = [error_of(variant) for variant in ordered]
    assert errors == sorted(errors) and errors[0] > 0
    kept = Variant("E2M1", "E4M3", 16, 64)
    assert error_of(kept) < error_of(Variant("E2M1", "E4M3", 16))
    x = torch.randn(64, 512).bfloat16()
    assert torch.equal(kept.round_trip(x)[:, -64:], x[:, -64:].float())
    assert torch.equal(DSA_MAIN.round_trip(x)[:, -64:], x[:, -64:].float())


def test_t_quantiles():
    """Tables of Student's t."""
    for freedom, expected in {1: 12.706, 2: 4.303, 4: 2.776, 9: 2.262, 31: 2.040}.items():
        assert stats.t_quantile(0.975, freedom) == pytest.approx(expected, rel=3e-4), freedom
    assert stats.t_quantile(0.975, 3) == pytest.approx(3.182, rel=2e-3)


def test_shares():
    """Wilson's interval of 7 in 10, and of all and none."""
    found = stats.share(7, 10)
    assert (found.low, found.high) == pytest.approx((0.3968, 0.8922), abs=1e-4)
    assert stats.share(10, 10).high == 1 and stats.share(10, 10).low == pytest.approx(
        0.7225, abs=1e-4
    )
    assert stats.share(0, 10).low == pytest.approx(0, abs=1e-12)
    for empty in (lambda: stats.share(0, 0), lambda: stats.mean([])):
        with pytest.raises(ValueError, match="no samples"):
            empty()


def test_means():
    found = stats.mean([1.0, 2.0, 3.0, 4.0])
    half = 3.1824 * math.sqrt(5 / 3 / 4)
    assert found.value == 2.5 and found.n == 4
    assert found.high - found.value == pytest.approx(half, rel=2e-3)
    assert stats.mean([0.99, 1.0, 1.0], 0.0, 1.0).high == 1.0
    assert stats.mean([0.5], 0.0, 1.0).low == 0.0


@pytest.mark.parametrize("n", [8, 32])
def test_intervals_cover_the_mean(n):
    """By simulation: 95 % of the intervals hold the true mean, of normal and of skewed samples."""
    random = torch.Generator().manual_seed(n)
    runs = 2000
    for draw, mean, least in (
        (torch.randn(runs, n, generator=random), 0.0, 0.94),
        (torch.rand(runs, n, generator=random) ** 2, 1 / 3, 0.92),
    ):
        found = [stats.mean(row.tolist()) for row in draw.double()]
        held = sum(e.low <= mean <= e.high for e in found) / runs
        assert least <= held <= 0.965


def test_share_intervals_cover_the_share():
    random = torch.Generator().manual_seed(1)
    for p in (0.5, 0.9, 0.98):
        counts = (torch.rand(2000, 64, generator=random) < p).sum(1).tolist()
        held = sum(stats.share(c, 64).low <= p <= stats.share(c, 64).high for c in counts)
        assert 0.92 <= held / 2000 <= 0.985
