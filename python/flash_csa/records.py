"""Records and pages: the formats of the cache, read from the table that the kernels use."""

from dataclasses import dataclass

import torch

from . import _C
from ._explain import INT32_MAX, explained
from ._fakes import describe

PAGE_ALIGN = 16  # bytes: base and stride of pages, the widest vector load


@dataclass(frozen=True)
class Record:
    """One format: `data_bytes` of codes (and BF16 values), then `scale_bytes` of scales.

    The first `coded_dims` of `dims` values are quantised in groups of `group`; the rest are BF16.
    `page_order` is "token-major" (record after record) or "page-split" (all rows of the page, then
    all scales). `id` is what op schemas take.
    """

    id: int
    name: str
    element: str
    scale_kind: str
    page_order: str
    dims: int
    coded_dims: int
    group: int
    data_bytes: int
    scale_bytes: int
    page_align: int

    @property
    def bytes(self) -> int:
        """Bytes of one record."""
        return self.data_bytes + self.scale_bytes

    def payload(self, page_size: int) -> int:
        """Bytes of a page of `page_size` records."""
        return -(-page_size * self.bytes // self.page_align) * self.page_align

    def page_bytes(self, page_size: int) -> int:
        """Bytes of an allocated page: its payload, rounded up to the alignment of pages."""
        return -(-self.payload(page_size) // PAGE_ALIGN) * PAGE_ALIGN

    def data_at(self, offset: int) -> int:
        """Byte offset in its page of the row of record `offset`."""
        return offset * (self.bytes if self.page_order == "token-major" else self.data_bytes)

    def scale_at(self, offset: int, page_size: int) -> int:
        """Byte offset in its page of the scales of record `offset`."""
        if self.page_order == "token-major":
            return offset * self.bytes + self.data_bytes
        return page_size * self.data_bytes + offset * self.scale_bytes


class _Records(dict[str, Record]):
    def __missing__(self, name: str) -> Record:
        raise ValueError(f"flash_csa.RECORDS: record must be one of {', '.join(self)}, got {name}")


RECORDS = _Records({row["name"]: Record(**row) for row in _C.RECORDS})


@dataclass(frozen=True)
class Pages:
    """Pages of one kind of record.

    data: u8 [num_pages, page_bytes], page_bytes >= payload(record, page_size); a strided view is
    fine: innermost contiguous, base and page stride multiples of 16 bytes.
    record: name of the format; stated, never guessed from a byte count.
    page_size: records of a page, 1 to 256.
    """

    data: torch.Tensor
    record: str
    page_size: int

    def __post_init__(self):
        if not isinstance(self.data, torch.Tensor):
            got = describe(self.data)
            raise ValueError(f"flash_csa.Pages: data must be uint8 [num_pages, bytes], got {got}")
        RECORDS[str(self.record)]  # an unknown name is refused here, where it is given
        if isinstance(self.page_size, int) and not 1 <= self.page_size <= _C.MAX_PAGE_SIZE:
            most, got = _C.MAX_PAGE_SIZE, self.page_size
            raise ValueError(f"flash_csa.Pages: page_size must be in [1, {most}], got {got}")

    @classmethod
    @explained(num_pages=(0, INT32_MAX), page_size=(1, _C.MAX_PAGE_SIZE))
    def empty(
        cls, num_pages: int, record: str, page_size: int, device: torch.device | str = "cpu"
    ) -> "Pages":
        """Zeroed pages: a record that was never written decodes to zeros."""
        shape = (num_pages, RECORDS[record].page_bytes(page_size))
        return cls(torch.zeros(shape, dtype=torch.uint8, device=device), record, page_size)

    @property
    def num_slots(self) -> int:
        """Slots of all pages; a slot is page * page_size + offset."""
        return self.data.shape[0] * self.page_size


def flat(pages: Pages | None) -> tuple[torch.Tensor | None, int, int]:
    """Pages as op schemas take them: tensor, record id, page size."""
    if pages is None:
        return None, -1, 0
    return pages.data, RECORDS[pages.record].id, pages.page_size
