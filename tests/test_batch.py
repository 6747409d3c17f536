"""Rows of prefill chunks and decode steps, with padding inside and behind."""

import pytest
import torch

from flash_csa.batch import Batch


def rows_of(batch: Batch) -> list[tuple[int, int]]:
    return list(zip(batch.row_request.tolist(), batch.positions.tolist(), strict=True))


def test_prefill_chunks_and_decode_rows_in_one_batch():
    batch = Batch.build([0, 70, 9], [3, 1, 0])
    assert rows_of(batch) == [(0, 0), (0, 1), (0, 2), (1, 70)]
    assert batch.cu_tokens.tolist() == [0, 3, 4, 4]
    assert batch.start.tolist() == [0, 70, 9]
    assert batch.tail_slot.tolist() == [0, 1, 2]
    assert (batch.max_rows, batch.num_rows, batch.num_requests) == (3, 4, 3)
    names = ("positions", "row_request", "cu_tokens", "start", "tail_slot")
    assert all(getattr(batch, name).dtype == torch.int32 for name in names)


def test_padding_inside_and_behind():
    batch = Batch.build([5, 0], [1, 2], owned=[3, 2], num_rows=7, tail_slot=[4, -1], max_rows=9)
    absent = (-1, -1)
    assert rows_of(batch) == [(0, 5), absent, absent, (1, 0), (1, 1), absent, absent]
    assert batch.cu_tokens.tolist() == [0, 3, 5]
    assert batch.tail_slot.tolist() == [4, -1]
    assert batch.max_rows == 9


def test_decode_with_drafts():
    assert rows_of(Batch.decode([7, 0])) == [(0, 7), (1, 0)]
    batch = Batch.decode([7, 0], drafts=2)
    assert rows_of(batch) == [(0, 7), (0, 8), (0, 9), (1, 0), (1, 1), (1, 2)]
    assert batch.max_rows == 3


def test_empty_batches():
    batch = Batch.build([], [])
    assert (batch.num_rows, batch.num_requests, batch.max_rows) == (0, 0, 1)
    assert batch.cu_tokens.tolist() == [0]
    assert rows_of(Batch.build([], [], num_rows=2)) == [(-1, -1)] * 2


def test_copy_keeps_the_addresses():
    batch = Batch.decode([7, 0])
    addresses = [batch.positions.data_ptr(), batch.start.data_ptr()]
    assert batch.copy_(Batch.decode([8, 1])) is batch
    assert rows_of(batch) == [(0, 8), (1, 1)]
    assert addresses == [batch.positions.data_ptr(), batch.start.data_ptr()]
    with pytest.raises(ValueError, match=r"other must be \(2, 2\) rows and requests, got \(1, 1\)"):
        batch.copy_(Batch.decode([8]))
    with pytest.raises(ValueError, match="max_rows must be at most 1, got 2"):
        batch.copy_(Batch.build([0, 0], [2, 0]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": [0], "rows": [1, 2]}, "rows must be 1 values, got 2"),
        ({"start": [-1], "rows": [1]}, r"start must be not negative, got \[-1\]"),
        ({"start": [0], "rows": [-1]}, r"rows must be not negative, got \[-1\]"),
        ({"start": [0], "rows": [2], "owned": [1]}, r"owned must be at least rows, got \[1\]"),
        ({"start": [0], "rows": [2], "num_rows": 1}, "num_rows must be at least 2, got 1"),
        ({"start": [0], "rows": [2], "max_rows": 1}, "max_rows must be at least 2, got 1"),
        ({"start": [0], "rows": [2], "tail_slot": []}, "tail_slot must be 1 values, got 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=f"^flash_csa.Batch: {message}$"):
        Batch.build(**arguments)
