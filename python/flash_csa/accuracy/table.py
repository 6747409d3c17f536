"""Samples in, results with intervals out."""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from . import stats
from .case import Case


@dataclass(frozen=True)
class Metric:
    """better: "lower" or "higher". low, high: what it can be."""

    better: str
    low: float = 0.0
    high: float = math.inf


SHARE = Metric("higher", 0.0, 1.0)
ERROR = Metric("lower")
METRICS = {
    "output error": ERROR,
    "value error": ERROR,
    "recall": SHARE,
    "recall of the oracle": SHARE,
    "Jaccard": SHARE,
    "mass covered": SHARE,
    "differing slots": Metric("lower", 0.0, 1.0),
    "boundary gap": Metric("higher"),
    "found": SHARE,
    "answered": SHARE,
    "decoy wins": Metric("lower", 0.0, 1.0),
    "pool recall@64": SHARE,
    "pool recall@256": SHARE,
    "pool recall@1024": SHARE,
}
GAPS, PER_DECADE = (-6, 1), 4  # decades of boundary gaps, and bins in each
COUNTED = ("found", "answered", "decoy wins")  # yes or no for each row


@dataclass(frozen=True)
class Result:
    """A mean over query rows. bucket: "all", or one mode, layer or range of positions."""

    experiment: str
    input: str
    context: int
    backend: str
    variant: str
    metric: str
    better: str
    bucket: str
    value: float
    low: float
    high: float
    n: int
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple:
        """What two runs are matched by."""
        return (
            *(self.experiment, self.input, self.context, self.backend),
            *(self.variant, self.metric, self.bucket),
        )


@dataclass
class Table:
    """Samples of one experiment on one input, over its draws."""

    experiment: str
    input: str
    context: int
    backend: str
    _samples: dict[tuple[str, str], list[tuple[Case, int | None, list[float]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def put(
        self, case: Case, variant: str, metric: str, layer: int | None, samples: Tensor, **facts
    ) -> None:
        """One value for each query row of the case; layer None: of no layer. Facts are the
        variant's."""
        METRICS[metric]  # an unknown name is refused here
        self._samples[variant, metric].append((case, layer, samples.double().tolist()))
        self._facts.setdefault(variant, {}).update(facts)

    def results(self) -> list[Result]:
        """Every variant and metric: over all rows, then by mode, layer, position."""
        made = []
        for (variant, metric), parts in self._samples.items():
            buckets: dict[str, dict[tuple[int, int], list[float]]] = defaultdict(
                lambda: defaultdict(list)
            )
            for case, layer, samples in parts:
                names = _names(case, layer)
                for row, value in enumerate(samples):
                    if not math.isnan(value):
                        for name in names[row]:
                            buckets[name][id(case), row].append(value)
            made += [
                self._result(variant, metric, name, list(rows.values()))
                for name, rows in buckets.items()
            ]
        return made

    def histograms(self) -> list[dict[str, Any]]:
        """Counts of boundary gaps by decade, `PER_DECADE` bins each; what lies outside counts in
        the first and the last bin."""
        made = []
        for (variant, metric), parts in self._samples.items():
            if metric != "boundary gap":
                continue
            counts = [0] * (PER_DECADE * (GAPS[1] - GAPS[0]))
            values = [v for _, _, samples in parts for v in samples if not math.isnan(v)]
            for value in values:
                place = (math.log10(max(value, 1e-30)) - GAPS[0]) * PER_DECADE
                counts[min(len(counts) - 1, max(0, int(place)))] += 1
            made.append(
                {
                    "experiment": self.experiment,
                    "input": self.input,
                    "context": self.context,
                    "backend": self.backend,
                    "variant": variant,
                    "first_decade": GAPS[0],
                    "bins_per_decade": PER_DECADE,
                    "counts": counts,
                }
            )
        return made

    def _result(self, variant: str, metric: str, bucket: str, rows: list[list[float]]) -> Result:
        kind = METRICS[metric]
        means = [math.fsum(row) / len(row) for row in rows]
        if metric in COUNTED:
            found = stats.share(math.fsum(means), len(means))
        else:
            found = stats.mean(means, kind.low, kind.high)
        return Result(
            self.experiment,
            self.input,
            self.context,
            self.backend,
            variant,
            metric,
            kind.better,
            bucket,
            *(_rounded(x) for x in (found.value, found.low, found.high)),
            found.n,
            self._facts[variant],
        )


def _names(case: Case, layer: int | None) -> list[list[str]]:
    """The buckets of each row."""
    common = ["all"]
    if layer is not None:
        common += [f"mode {case.inputs.modes[layer]}", f"layer {layer}"]
    evidence = case.inputs.evidence
    if evidence is None:
        return [[*common, f"position {place}"] for place in case.inputs.buckets()]
    pairs = zip(evidence.kinds, evidence.borders, strict=True)
    return [[*common, f"kind {kind}", f"place {place}"] for kind, place in pairs]


def _rounded(x: float) -> float | None:
    """Eight digits: what is written is the same on every run. JSON has no infinity."""
    return float(f"{x:.8g}") if math.isfinite(x) else None
