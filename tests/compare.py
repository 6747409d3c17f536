"""What a comparison of two tensors says. One number can hide a fault: a cosine does not see a
factor, a norm does not see a bias, no error bound sees the sign of a zero."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Difference:
    """`got` against `want`. Values that both are NaN or the same infinity differ by 0."""

    max_abs: float  # NaN where only one is NaN
    rel_l2: float  # norm of the difference over the norm of `want`
    signed_mean: float  # of got - want: a bias, such as truncation gives
    bytes: int  # that differ
    of_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.bytes} of {self.of_bytes} bytes differ, max abs {self.max_abs:.3g}, "
            f"rel L2 {self.rel_l2:.3g}, signed mean {self.signed_mean:+.3g}"
        )


def byte_view(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, flat: they compare equal where NaN does not."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def difference(got: torch.Tensor, want: torch.Tensor) -> Difference:
    """Of two tensors of one dtype and shape."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape), "another dtype or shape"
    a, b = got.double().flatten(), want.double().flatten()
    error = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b)
    differ = byte_view(got) != byte_view(want)
    return Difference(
        max_abs=float(error.abs().max()) if len(error) else 0.0,
        rel_l2=float(error.norm() / b[b.isfinite()].norm().clamp(min=2.0**-149)),
        signed_mean=float(error.mean()) if len(error) else 0.0,
        bytes=int(differ.count_nonzero()),
        of_bytes=len(differ),
    )


def assert_same_bytes(got: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
    """Fails with the whole report where a byte differs."""
    same = (got.dtype, got.shape) == (want.dtype, want.shape)
    same = same and torch.equal(byte_view(got), byte_view(want))
    assert same, f"{what}: {difference(got, want)}"
