"""The published record formats, byte by byte.

This table is the reference's own statement of the formats; the library has its own, and a test
compares the two.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """One cache format: `dims` values of one entry in `data_bytes` + `scale_bytes` bytes."""

    name: str
    dims: int
    element: str  # "E2M1": two codes per byte, the even dim in the low nibble; "E4M3"
    group: int  # channels that share a scale
    scale_kind: str  # "E4M3", "UE8M0" (exponent + 127) or "FP32" (little-endian)
    amax_floor: float  # smallest group maximum that a scale is derived from
    data_bytes: int
    scale_bytes: int
    page_order: str  # "token-major": data and scales of an entry together; "page-split"
    page_align: int = 1  # a page is padded to a multiple of this many bytes
    bf16_dims: int = 0  # last dims, kept in BF16 after the codes

    @property
    def bytes(self) -> int:
        """Bytes of one entry."""
        return self.data_bytes + self.scale_bytes

    @property
    def coded_dims(self) -> int:
        """Leading dims that are quantised."""
        return self.dims - self.bf16_dims

    @property
    def num_groups(self) -> int:
        """Scales per entry."""
        return self.coded_dims // self.group

    def payload(self, page_size: int) -> int:
        """Bytes of a page of `page_size` entries, padding included."""
        payload = self.bytes * page_size
        return -(-payload // self.page_align) * self.page_align


RECORDS = {
    record.name: record
    for record in (
        # V4.1 compressed KV: 256 + 32 = 288 bytes
        Record("MainFp4", 512, "E2M1", 16, "E4M3", 6 * 2.0**-9, 256, 32, "token-major"),
        # V4.1 sliding window: 512 + 16 = 528 bytes
        Record("WindowFp8", 512, "E4M3", 32, "UE8M0", 1e-4, 512, 16, "token-major"),
        # V4.1 and V4 index keys: 64 + 4 = 68 bytes
        Record("IndexFp4", 128, "E2M1", 32, "UE8M0", 6 * 2.0**-126, 64, 4, "page-split"),
        # V4 main and window: 448 E4M3 + 64 BF16, 7 scales + 1 zero byte: 576 + 8 = 584 bytes
        Record("MixedFp8", 512, "E4M3", 64, "UE8M0", 1e-4, 576, 8, "page-split", 576, 64),
        # V3.2 index keys, and V4's on Hopper: 128 + 4 = 132 bytes
        Record("IndexFp8", 128, "E4M3", 128, "FP32", 1e-4, 128, 4, "page-split"),
    )
}


def record_of(record) -> Record:
    """Row of the table for a record name, or for any object that carries one as `name`."""
    return RECORDS[getattr(record, "name", record)]
