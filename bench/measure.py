"""From a case to its row: ceilings, both sides' graphs, checks against floors and records."""

import gc
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import ours, provenance
from .cases import PAGE, WORKING_SET, Case
from .inputs import Inputs
from .peers import COOPERATIVE_ROWS, Peers, named
from .results import KEYS, Row
from .timing import (
    FEW_SAMPLES,
    LONG_US,
    SAMPLES,
    SLOW,
    VERY_LONG_US,
    Graph,
    Timer,
    ceiling_calls,
)

# Recorded on an H200: bytes/s, FLOP/s and the microseconds of a launch in a graph.
RECORDED = {"copy": 4.2e12, "read": 4.6e12, "gather": 3.9e12, "bf16": 797e12, "fp8": 1362e12}
RECORDED_LAUNCH_US = 1.3
PEAK = {"H200": 4.8e12, "H100": 3.35e12}  # bytes/s of the datasheets: no time is below
PEER_TOLERANCE = 0.10
PEER_NOISE = 0.02  # another way to call a peer is faster by more than this, or is not shown
EMPTY_LAUNCHES = 200


class BelowFloor(RuntimeError):
    """A time that the bytes cannot have taken: the case does not measure what it says."""


@dataclass
class Ceilings:
    """The larger of what this run measured and what is recorded for the device."""

    rates: dict[str, float]
    launch_us: float
    peak: float

    def binding(self, case: Case) -> tuple[str, float]:
        """The ceiling that binds a case, in words, and the microseconds that it allows."""
        memory, matrix = case.unit
        cost = case.cost
        limits = {
            f"{memory} {self.rates[memory] / 1e12:.2f} TB/s": cost.nbytes / self.rates[memory],
            f"{matrix} {self.rates[matrix] / 1e12:.0f} TFLOP/s": cost.flops / self.rates[matrix],
            f"launch {self.launch_us:.2f} us": self.launch_us / 1e6,
        }
        name = max(limits, key=limits.__getitem__)
        return name, limits[name] * 1e6


class Bench:
    """One run on one device."""

    def __init__(self, device: torch.device, *, dirty: bool) -> None:
        self.device = device
        self.timer = Timer(device)
        self.inputs = Inputs(device)
        self.peers = Peers()
        self.dirty = dirty
        self.facts = provenance.device_facts(device)
        self.ceilings: Ceilings | None = None

    def measure_ceilings(self, cases: list[Case]) -> list[Row]:
        """Rows of the ceilings and of the launch floor; all later rows refer to them."""
        recorded = "H200" in self.facts["device"]
        rates, rows = {}, []
        for case in cases:
            if case.kind == "empty":
                continue
            calls, amount, unit = ceiling_calls(case["what"], self.device)
            samples = self.timer.interleaved([Graph(calls)], SAMPLES)[0]
            measured = amount / statistics.median(samples) * 1e6
            known = RECORDED[case["what"]] if recorded else measured
            rates[case["what"]] = max(measured, known)
            scale = f"{known / 1e12:.2f} T{'B' if unit == 'bytes' else 'FLOP'}/s"
            limit = {"ceiling": scale, "fraction": measured / known}
            values = {unit: int(amount), "instances": len(calls), **limit}
            rows.append(self._row(case, samples, **values))
            del calls
            self.free()
        floor = next(case for case in cases if case.kind == "empty")
        work = ours.build(floor, self.inputs, EMPTY_LAUNCHES)
        samples = self.timer.interleaved([Graph(work.calls)], SAMPLES)[0]
        launch_us = statistics.median(samples)
        known_us = RECORDED_LAUNCH_US if recorded else launch_us
        limit = {"ceiling": f"launch {known_us:.2f} us", "fraction": known_us / launch_us}
        rows.append(self._row(floor, samples, instances=EMPTY_LAUNCHES, launches=1, **limit))
        peaks = (rate for name, rate in PEAK.items() if name in self.facts["device"])
        peak = next(peaks, 1.1 * rates["read"])
        self.ceilings = Ceilings(rates, min(launch_us, known_us), peak)
        return rows

    def measure(self, case: Case) -> Row:
        """Medians of ours, the peer and, where it is faster, another way to call it, interleaved.

        Raises:
            BelowFloor: ours is faster than its bytes allow.
            RuntimeError, ValueError: of the library.
        """
        assert self.ceilings is not None
        self.free()
        work = ours.build(case, self.inputs, case.instances)
        notes: list[str] = []
        sides = self._peer_calls(case, work, notes)
        one_us, allocated = self.timer.once(work.calls[0])
        count = _affordable(case, len(work.calls), one_us)
        our_graph = Graph(work.calls[:count])
        peer, ways, peers_us = self._peer_graphs(case, sides, count, notes)
        graphs = [our_graph, *ways.values()]
        taken = self.timer.interleaved(graphs, 1)
        more = _wanted_samples(taken, count) - 1
        for times, others in zip(taken, self.timer.interleaved(graphs, more), strict=True):
            times += others
        state = provenance.device_state(self.device)
        median_us = statistics.median(taken[0])
        cost = case.cost
        if median_us < cost.nbytes / self.ceilings.peak * 1e6:
            raise BelowFloor(f"{median_us:.2f} us for {cost.nbytes} bytes is below the byte floor")
        taken_us = dict(zip(ways, map(statistics.median, taken[1:]), strict=True))
        peers_us |= {name: round(us, 1) for name, us in taken_us.items()}
        peer_us = taken_us.get(peer)
        enough = (1 - PEER_NOISE) * taken_us.get(peer, math.inf)
        best = next((name for name, us in taken_us.items() if us < enough), None)
        best_us = taken_us.get(best)
        notes += peer_notes(case, peer, peer_us)
        ceiling, floor_us = self.ceilings.binding(case)
        row = self._row(
            case,
            taken[0],
            peer=peer if peer_us else None,
            peer_us=peer_us,
            peer_samples=len(taken[1]) if peer_us else 0,
            peers_us=peers_us,
            ratio=peer_us / median_us if peer_us else None,
            best_peer=best,
            best_peer_us=best_us,
            best_ratio=best_us / median_us if best_us else None,
            bytes=cost.nbytes,
            flops=cost.flops,
            ceiling=ceiling,
            fraction=floor_us / median_us,
            launches=our_graph.launches,
            scratch_bytes=work.scratch_bytes + allocated,
            instances=count,
            note="; ".join(notes),
            **state,
        )
        return row

    def free(self) -> None:
        """Graphs and instances of the case before; caches stay."""
        gc.collect()
        torch.cuda.empty_cache()

    def _peer_calls(
        self, case: Case, work: ours.Work, notes: list[str]
    ) -> dict[str, list[Callable[[], Any]]]:
        try:
            return self.peers.build(case, self.inputs, work)
        except Exception as error:  # a peer's fault must not cost our figure
            notes.append(f"peer failed: {_first_line(error)}")
            return {}

    def _peer_graphs(
        self,
        case: Case,
        sides: dict[str, list[Callable[[], Any]]],
        count: int,
        notes: list[str],
    ) -> tuple[str | None, dict[str, Graph], dict[str, float]]:
        """Which of the ways to call a peer is the peer; graphs of it and, if that is another, of
        the fastest; what each way took in a few samples of its own."""
        graphs, taken_us = {}, {}
        for name, calls in sides.items():
            try:
                graph = Graph(calls[:count])
                us = statistics.median(self.timer.interleaved([graph], FEW_SAMPLES)[0])
            except Exception as error:
                notes.append(f"peer {name} failed: {_first_line(error)}")
                continue
            graphs[name], taken_us[name] = graph, round(us, 1)
        fastest = min(graphs, key=taken_us.__getitem__, default=None)
        peer = named(case, sides) or fastest
        return peer, {name: graphs[name] for name in (peer, fastest) if name in graphs}, taken_us

    def _row(self, case: Case, samples: list[float], **values: Any) -> Row:
        us = statistics.median(samples)
        row: Row = dict.fromkeys(KEYS)
        row |= {
            "case": case.name,
            "stage": case.stage,
            "shape": dict(case.shape),
            "ours_us": us,
            "ours_samples": len(samples),
            "peer_samples": 0,
            "peers_us": {},
            "bytes": 0,
            "flops": 0,
            "scratch_bytes": 0,
            "page_size": PAGE,
            "record": case.record,
            **self.facts,
            **provenance.device_state(self.device),
            **provenance.trees(case.stage),
            "dirty": self.dirty,
            "note": "",
            "date": provenance.now(),
        }
        row |= values
        row["gbps"] = row["bytes"] / us / 1e3
        row["tflops"] = row["flops"] / us / 1e6
        return row


def peer_notes(case: Case, peer: str | None, us: float | None) -> list[str]:
    """That a peer's time is far from its recorded one, and why where that is known."""
    off = us / case.peer_us - 1 if us and case.peer_us else 0.0
    if peer is None or abs(off) <= PEER_TOLERANCE:
        return []
    note = f"peer {off:+.0%} off its recorded {case.peer_us} us"
    if case.kind in ("index_select", "reindex"):
        recorded = "cooperative_topk" if case["rows"] <= COOPERATIVE_ROWS else "persistent_topk"
        if not peer.endswith(recorded):
            note += f", which is with {recorded}; {peer.split()[-1]} is faster here"
    return [note]


def _affordable(case: Case, count: int, one_us: float) -> int:
    """Instances of a graph that does not take long, over a working set that is still large."""
    least = 1 if case.shared_bytes else math.ceil(WORKING_SET / max(1, case.own_bytes))
    return max(1, min(count, max(least, int(LONG_US / one_us))))


def _wanted_samples(first: list[list[float]], count: int) -> int:
    """From one sample of ours and, if there is one, of the peer."""
    ours_us = first[0][0]
    if ours_us * count > VERY_LONG_US:
        return 1
    slow = len(first) > 1 and ours_us > SLOW * first[1][0]
    return FEW_SAMPLES if slow or ours_us * count > LONG_US / 2 else SAMPLES


def _first_line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:160]
