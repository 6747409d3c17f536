"""Records in pages. A slot is `page * page_size + offset`; outside [0, capacity) it is absent.

Token-major pages hold the bytes of one entry after those of another. Page-split pages hold the
data of all entries of the page, then their scales; padding, if any, follows.
"""

import torch
from torch import Tensor

from .layout import Record, record_of
from .quant import Quantized, dequantize, quantize


def new_pages(num_pages: int, record, page_size: int) -> Tensor:
    """Zeroed pages u8[num_pages, page_bytes] for `record`. Never-written entries decode to 0."""
    return torch.zeros(num_pages, record_of(record).payload(page_size), dtype=torch.uint8)


def _byte_offsets(offset: Tensor, record: Record, page_size: int) -> tuple[Tensor, Tensor]:
    """Where in a page the data and the scales of its entries `offset` i64[n] lie."""
    if record.page_order == "token-major":
        data = offset * record.bytes
        scales = data + record.data_bytes
    else:
        data = offset * record.data_bytes
        scales = page_size * record.data_bytes + offset * record.scale_bytes
    return (
        data[:, None] + torch.arange(record.data_bytes),
        scales[:, None] + torch.arange(record.scale_bytes),
    )


def write_rows(rows: Quantized, pages: Tensor, slots: Tensor, record, page_size: int) -> None:
    """Writes n encoded rows to `slots` i32[n] of `pages` u8[num_pages, >= page_bytes], in place."""
    record = record_of(record)
    slots = slots.long()
    present = (slots >= 0) & (slots < pages.shape[0] * page_size)
    page = (slots[present] // page_size)[:, None]
    data, scales = _byte_offsets(slots[present] % page_size, record, page_size)
    pages[page, data] = rows.data[present]
    pages[page, scales] = rows.scales[present]


def read_rows(pages: Tensor, slots: Tensor, record, page_size: int) -> Quantized:
    """The bytes at `slots` i32[n]; absent slots read as zero bytes, which decode to 0."""
    record = record_of(record)
    slots = slots.long()
    present = (slots >= 0) & (slots < pages.shape[0] * page_size)
    slots = torch.where(present, slots, 0)
    page = (slots // page_size)[:, None]
    data, scales = _byte_offsets(slots % page_size, record, page_size)
    return Quantized(
        torch.where(present[:, None], pages[page, data], 0),
        torch.where(present[:, None], pages[page, scales], 0),
    )


def store(x: Tensor, pages: Tensor, slots: Tensor, record, page_size: int) -> None:
    """Quantises rows `x` bf16[n, dims] and writes them to `slots` i32[n], in place."""
    write_rows(quantize(x, record), pages, slots, record, page_size)


def load(pages: Tensor, slots: Tensor, record, page_size: int) -> Tensor:
    """Dequantised rows f32[n, dims] at `slots` i32[n]; absent slots give 0."""
    return dequantize(*read_rows(pages, slots, record, page_size), record)
