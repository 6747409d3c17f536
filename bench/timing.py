"""How times are taken: CUDA graphs of many instances, cold L2, medians, both sides interleaved."""

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flash_csa import RECORDS

Call = Callable[[], Any]
FLUSH_BYTES = 256 << 20  # five times the L2
SAMPLES = 12
FEW_SAMPLES = 3  # while ours is far slower than the peer, or a graph takes long; then 1
SLOW = 10.0  # times the peer
LONG_US = 300_000.0  # of one graph
VERY_LONG_US = 1_000_000.0


class Timer:
    """Times closures on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def once(self, call: Call) -> tuple[float, int]:
        """Microseconds of one warm call, launches included; bytes that the first one allocated."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        allocated = torch.cuda.max_memory_allocated() - before
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e6, allocated

    def sample(self, graph: "Graph") -> float:
        """Microseconds per call of one replay with a cold L2."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / graph.calls

    def interleaved(self, graphs: Sequence["Graph"], samples: int) -> list[list[float]]:
        """`samples` times of each graph, in turns."""
        taken: list[list[float]] = [[] for _ in graphs]
        for _ in range(samples):
            for times, graph in zip(taken, graphs, strict=True):
                times.append(self.sample(graph))
        return taken


class Graph:
    """One CUDA graph of `calls` closures, captured after each ran once."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = len(calls)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:  # compiles, loads modules, makes handles
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(self._graph):
            for call in calls:
                call()
        self.replay()  # instantiates

    def replay(self) -> None:
        self._graph.replay()

    @property
    def launches(self) -> int | None:
        """Nodes of the graph per call; None where the driver cannot be asked."""
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return None
        count = ctypes.c_size_t()
        handle = ctypes.c_void_p(self._graph.raw_cuda_graph())
        if driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) != 0:
            return None
        return round(count.value / self.calls)


# Ceilings

GB = 1 << 30
MATRIX = 8192


def ceiling_calls(what: str, device: torch.device) -> tuple[list[Call], float, str]:
    """Closures that reach for a ceiling, their bytes or FLOPs each, and the unit."""
    if what in ("copy", "read", "gather"):
        return (*_memory_calls(what, device), "bytes")
    a, b = (torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16) for _ in range(2))
    flops = 2.0 * MATRIX**3
    if what == "bf16":
        return [lambda: torch.mm(a, b)] * 3, flops, "flops"
    one = torch.ones((), device=device)
    x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t().contiguous().t()
    call = lambda: torch._scaled_mm(x, y, one, one, out_dtype=torch.bfloat16)  # noqa: E731
    return [call] * 3, flops, "flops"


def _memory_calls(what: str, device: torch.device) -> tuple[list[Call], float]:
    source = torch.randint(0, 100, (2 * GB // 8,), device=device)
    floats = source.view(torch.float32)
    if what == "copy":  # by a kernel: a copy node of a graph reaches two thirds of it
        target = torch.empty_like(floats)
        return [lambda: torch.neg(floats, out=target)] * 3, 2.0 * source.nbytes
    if what == "read":
        return [lambda: torch.amax(floats)] * 3, float(source.nbytes)
    record = RECORDS["MainFp4"].bytes
    rows = source.view(torch.uint8)[: source.nbytes // record * record].view(-1, record)
    slots = torch.randperm(len(rows), device=device)[: len(rows) // 2].int()
    words = torch.empty(1 + len(RECORDS), dtype=torch.int32, device=device)
    call = lambda: torch.ops.flash_csa.probe(words, records=rows, slots=slots)  # noqa: E731
    return [call] * 3, float(len(slots) * record)
