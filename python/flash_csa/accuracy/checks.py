"""Facts that must come out, each named by the axis that it stands on."""

from dataclasses import dataclass

# The axes, in the order of the data flow: the first that fails is where a fault lies.
AXES = (
    "visibility and slots",
    "RoPE of queries, window and index",  # of all alike, as the next three
    "compression",
    "E4M3 of main and window KV",
    "E2M1 of main KV and index",
    "UE8M0 of window KV and index",
    "main KV",
    "window KV",
    "main KV of V4",  # has the codec of window KV
    "index keys",
    "index queries",
    "index scores",
    "top-k of pool and selection",
    "pool",
    "selection",
    "reindex",
    "reuse",
    "attention",
    "group",  # all of them at work: at fault only where no stage is
    "reindex in a group",  # what its Full layers do not have wrong, too
    "reuse in a group",
)
HELD = "inputs of the stage, as the formulas made them"  # fixed, in most of them


@dataclass(frozen=True)
class Check:
    """`value` must lie within low and high. n: samples it rests on. held: what was fixed."""

    axis: str
    name: str
    value: float
    low: float
    high: float
    n: int
    held: str

    def __post_init__(self) -> None:
        if self.axis not in AXES:
            raise ValueError(f"flash_csa.accuracy: axis must be one of {AXES}, got {self.axis}")

    @property
    def holds(self) -> bool:
        """False for NaN too."""
        return self.low <= self.value <= self.high


def failing_axes(checks: list[Check]) -> list[str]:
    """The axes with a failed check, in the order of the data flow."""
    failed = {check.axis for check in checks if not check.holds}
    return [axis for axis in AXES if axis in failed]
