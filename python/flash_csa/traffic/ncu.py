"""Nsight Compute: DRAM bytes, sectors, hit rates and times of the kernels of a Python program.

The program marks what is measured, see `region` and `mark`: kernels between two marks are one item.
An item starts with a cold L2, which its kernels share. So what one of them leaves there for the
next crosses DRAM only where it does so in use, as long as a kernel runs once: the metrics of a
group are those that the counters take in one pass. The program runs once for each group.
"""

import contextlib
import csv
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DRAM = {"read": "dram__bytes_read.sum", "written": "dram__bytes_write.sum"}
L2 = {
    "sectors": "lts__t_sectors_op_read.sum",
    "hit_rate": "lts__t_sector_hit_rate.pct",
    "time": "gpu__time_duration.sum",
}
METRICS = DRAM | L2
MARK = "probe_kernel"
TIMEOUT = 420  # seconds
FLUSH_NBYTES = 1 << 28  # five times the L2


class Unavailable(RuntimeError):
    """There is no ncu, or it may not read this device's counters; one line says which."""


@dataclass(frozen=True)
class Counted:
    """The kernels of one item. hit_rate: of the L2, 0 to 1, weighted by sectors. What was not
    asked for is 0."""

    launches: int
    read_nbytes: int
    written_nbytes: int
    sectors: int  # read through the L2, 32 bytes each
    hit_rate: float
    time_us: float

    @property
    def nbytes(self) -> int:
        return self.read_nbytes + self.written_nbytes


def find() -> str | None:
    """The program: on the PATH, or in the toolkit."""
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = os.pathsep.join([os.environ.get("PATH", ""), os.path.join(toolkit, "bin")])
    return shutil.which("ncu", path=path)


def profile(
    arguments: Sequence[str],
    groups: Sequence[Mapping[str, str]] = (DRAM, L2),
    timeout: float = TIMEOUT,
) -> tuple[list[Counted], str]:
    """Runs `python arguments` under ncu; its items in order, and what it printed. timeout: seconds
    of a group.

    Raises:
        Unavailable: no ncu, no counters, or the program failed.
    """
    program = find()
    if program is None:
        raise Unavailable("there is no ncu here")
    runs = [_run(program, arguments, list(group.values()), timeout) for group in groups]
    return parse(*(text for text, _ in runs)), runs[-1][1]


def _run(
    program: str, arguments: Sequence[str], metrics: list[str], timeout: float
) -> tuple[str, str]:
    """ncu's log, and what the program printed."""
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "ncu.csv")
        command = [program, "--csv", "--page", "raw", "--print-units", "base", "--log-file", log]
        command += ["--clock-control", "none", "--cache-control", "none"]
        command += ["--profile-from-start", "off", "--target-processes", "all"]
        command += ["--metrics", ",".join(metrics), sys.executable, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"ncu was not done after {timeout:g} s") from error
        text = ""
        if os.path.exists(log):
            with open(log, encoding="utf-8") as file:
                text = file.read()
    errors = [line for line in text.splitlines() if line.startswith("==ERROR==")]
    if done.returncode != 0 or errors:
        lines = errors or done.stderr.strip().splitlines()[-1:]
        said = lines[0] if lines else f"exit code {done.returncode}"
        raise Unavailable(f"ncu: {said.removeprefix('==ERROR==').strip()}")
    return text, done.stdout


def parse(*logs: str) -> list[Counted]:
    """Items of ncu's CSV logs of one program: runs of kernels after each mark."""
    tables = [csv.DictReader(line for line in log.splitlines() if line[:1] == '"') for log in logs]
    items: list[list[dict[str, str]]] = []
    for rows in zip(*tables, strict=True):
        row = {name: value for part in rows for name, value in part.items()}
        if not row["ID"]:  # the units
            continue
        if MARK in row["Kernel Name"]:
            items.append([])
        elif items:
            items[-1].append(row)
    return [_counted(rows) for rows in items]


def _counted(rows: list[dict[str, str]]) -> Counted:
    values = [
        {name: float(row.get(metric, "0").replace(",", "")) for name, metric in METRICS.items()}
        for row in rows
    ]
    sectors = sum(value["sectors"] for value in values)
    hits = sum(value["sectors"] * value["hit_rate"] / 100 for value in values)
    return Counted(
        launches=len(rows),
        read_nbytes=int(sum(value["read"] for value in values)),
        written_nbytes=int(sum(value["written"] for value in values)),
        sectors=int(sectors),
        hit_rate=hits / sectors if sectors else 0.0,
        time_us=sum(value["time"] for value in values) / 1e3,
    )


@functools.cache
def _cold_lines() -> "torch.Tensor":
    """More than the L2 holds. Written once: lines that a flush wrote would stay in part, and be
    counted when measured kernels evict them."""
    import torch

    return torch.zeros(FLUSH_NBYTES // 8, dtype=torch.int64, device="cuda")


def flush() -> None:
    """In the measured program: fills the L2 with what nobody needs, by reading it."""
    import torch

    _cold_lines().sum()
    torch.cuda.synchronize()


def warm(call: Callable[[], object]) -> None:
    """In the measured program: runs what will be measured, twice and with a cold L2, so that no
    line is left there that its inputs were written with: some survive a flush."""
    for _ in range(2):
        flush()
        call()


@contextlib.contextmanager
def region() -> Iterator[None]:
    """In the measured program: kernels inside are measured; the L2 is cold at first."""
    import torch

    flush()
    torch.cuda.profiler.start()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()


def mark() -> None:
    """In the measured program: an item begins."""
    import torch

    from ..records import RECORDS

    words = torch.empty(1 + len(RECORDS), dtype=torch.int32, device="cuda")
    torch.ops.flash_csa.probe(words)
