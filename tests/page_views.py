"""Page buffers as a serving stack hands them over: padded strides, storage offsets, guard bands."""

import torch

from flash_csa import Pages
from flash_csa.reference.layout import record_of

POISON = 0xA5  # no record that a test writes is made of this byte alone


def guarded_pages(
    num_pages: int,
    record: str,
    page_size: int,
    *,
    padding: int = 0,
    offset: int = 512,
    fill: int = POISON,
    device: torch.device | str = "cpu",
) -> tuple[Pages, torch.Tensor]:
    """Pages inside a larger buffer: (pages, the whole buffer u8[...]), all bytes `fill`.

    Pages are at least `padding` bytes apart, the first lies `offset` bytes into the buffer, and as
    many bytes follow the last.
    """
    payload = record_of(record).payload(page_size)
    stride = -(-(payload + padding) // 16) * 16
    buffer = torch.full((offset + num_pages * stride + offset,), fill, dtype=torch.uint8)
    buffer = buffer.to(device)
    data = buffer.as_strided((num_pages, payload), (stride, 1), offset)
    return Pages(data, record, page_size), buffer


def on_device(view: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The view on a device as it is: strides, offset and the bytes between (.to packs a copy)."""
    storage = view.new_empty(0).set_(view.untyped_storage())
    return storage.to(device).as_strided(view.shape, view.stride(), view.storage_offset())
