"""Batch: the packed query rows of a step, built on the host from each request's start and rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ._explain import INT32_MAX, explained
from ._fakes import describe


@dataclass(frozen=True)
class Batch:
    """Packed rows of a step; all tensors i32 on one device.

    Request r owns rows [cu_tokens[r], cu_tokens[r + 1]): first its valid rows, at consecutive
    positions from start[r], then padded rows. A padded row has position -1 and row_request -1.
    """

    positions: torch.Tensor  # [R]
    row_request: torch.Tensor  # [R]
    cu_tokens: torch.Tensor  # [B + 1]
    start: torch.Tensor  # [B]
    tail_slot: torch.Tensor  # [B]; -1: no tail
    max_rows: int  # host upper bound of one request's rows, constant in a graph

    @classmethod
    @explained()
    def build(
        cls,
        start: Sequence[int],
        rows: Sequence[int],
        *,
        owned: Sequence[int] | None = None,
        num_rows: int | None = None,
        tail_slot: Sequence[int] | None = None,
        max_rows: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "Batch":
        """Rows of prefill chunks, decode steps or both.

        Args:
            start: position of each request's first row: the tokens it already has.
            rows: valid rows of each request, 0 allowed.
            owned: rows of each request with the padding behind its valid rows; default `rows`.
            num_rows: rows of the whole batch; those after the last request's are padding.
            tail_slot: each request's tail slot, -1 for none; default its number.
            max_rows: upper bound of one request's rows; default the largest of this batch.

        Raises:
            ValueError: lengths differ, a negative count, fewer rows than those counted, a position
                or a number of rows beyond int32.
        """
        starts, counts = _ints("start", start), _ints("rows", rows)
        owns = counts if owned is None else _ints("owned", owned)
        slots = np.arange(len(starts)) if tail_slot is None else _ints("tail_slot", tail_slot)
        for name, values in (("rows", counts), ("owned", owns), ("tail_slot", slots)):
            _check(values.shape == starts.shape, name, f"{len(starts)} values", len(values))
        _check((starts >= 0).all(), "start", "not negative", start)
        _check((counts >= 0).all(), "rows", "not negative", rows)
        _check((owns >= counts).all(), "owned", "at least rows", owned)
        ends = int((starts + counts).max(initial=0))
        _check(ends <= INT32_MAX, "start + rows", f"at most {INT32_MAX}", ends)
        most = int(owns.max(initial=1))
        _check(max_rows is None or max_rows >= most, "max_rows", f"at least {most}", max_rows)
        _check((max_rows or most) in range(INT32_MAX + 1), "max_rows", "int32", max_rows)
        cu_tokens = np.concatenate(([0], np.cumsum(owns)))
        last = int(cu_tokens[-1])
        _check(last <= INT32_MAX, "the sum of rows", f"at most {INT32_MAX}", last)
        _check(num_rows is None or num_rows >= last, "num_rows", f"at least {last}", num_rows)

        request = np.repeat(np.arange(len(starts)), owns)
        offset = np.arange(last) - cu_tokens[request]
        valid = offset < counts[request]
        padding = np.full((num_rows or last) - last, -1)
        positions = np.concatenate((np.where(valid, starts[request] + offset, -1), padding))
        row_request = np.concatenate((np.where(valid, request, -1), padding))
        tensors = (
            torch.from_numpy(values.astype(np.int32)).to(device)
            for values in (positions, row_request, cu_tokens, starts, slots)
        )
        return cls(*tensors, max_rows=max_rows or most)

    @classmethod
    @explained()
    def decode(
        cls, lengths: Sequence[int], *, drafts: int = 0, device: torch.device | str = "cpu"
    ) -> "Batch":
        """One row, and `drafts` more, for each request of `lengths` tokens."""
        _check(drafts >= 0, "drafts", "not negative", drafts)
        return cls.build(lengths, [1 + drafts] * len(lengths), device=device)

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]

    @property
    def num_requests(self) -> int:
        return self.start.shape[0]

    def flat(self) -> tuple[torch.Tensor, ...]:
        """The fields as op schemas take them."""
        return (
            self.positions,
            self.row_request,
            self.cu_tokens,
            self.start,
            self.tail_slot,
            self.max_rows,
        )

    @explained()
    def copy_(self, other: "Batch") -> "Batch":
        """Takes over the rows of `other` in place, so that a captured step replays with them.

        Raises:
            ValueError: another number of rows or requests, or more rows a request than max_rows.
        """
        shape, got = (self.num_rows, self.num_requests), (other.num_rows, other.num_requests)
        _check(got == shape, "other", f"{shape} rows and requests", got)
        _check(
            other.max_rows <= self.max_rows, "max_rows", f"at most {self.max_rows}", other.max_rows
        )
        for name in ("positions", "row_request", "cu_tokens", "start", "tail_slot"):
            getattr(self, name).copy_(getattr(other, name), non_blocking=True)
        return self


def _ints(name: str, values: Sequence[int]) -> np.ndarray:
    """A list of int32, as int64; nothing is rounded or wraps."""
    found = np.asarray(values)
    fits = found.ndim == 1 and (found.size == 0 or found.dtype.kind in "iu")
    _check(fits, name, "a list of int", describe(values))
    for value in (int(found.min(initial=0)), int(found.max(initial=0))):
        _check(abs(value) <= INT32_MAX, name, "int32", value)
    return found.astype(np.int64)


def _check(holds: bool, name: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"flash_csa.Batch: {name} must be {expected}, got {got}")
