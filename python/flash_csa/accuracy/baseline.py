"""Two runs side by side: what got worse, by the axis it belongs to.

A result regresses if it is worse than the baseline's by more than `tolerance` of it and by more
than a floor (`ERROR_FLOOR` of an error, `SHARE_FLOOR` of a share). Runs of the same settings draw
the same inputs, so sampling does not enter; the floors leave room for another order of summation. A
check that held and fails regresses, and so does a result that is missing from a table of both runs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checks import AXES
from .table import METRICS

ERROR_FLOOR, SHARE_FLOOR = 1e-4, 2e-3
TOLERANCE = 0.02
VIEW = ("experiment", "input", "context", "backend")
KEY = (*VIEW, "variant", "metric", "bucket")
SAME = ("k", "draws", "seed", "shape", "device")  # settings that decide what is drawn


@dataclass(frozen=True)
class Regression:
    """value and baseline: None where there is none."""

    axis: str
    what: str
    baseline: float | None
    value: float | None

    @property
    def size(self) -> float:
        """Relative change; infinite where something is missing."""
        if self.value is None or self.baseline is None:
            return float("inf")
        return abs(self.value - self.baseline) / max(abs(self.baseline), ERROR_FLOOR)


def load(path: Path) -> dict[str, Any]:
    """A results.json.

    Raises:
        ValueError: no such file, or another kind of file.
    """
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"flash_csa.accuracy: cannot read {path}: {error}") from error
    if not isinstance(run, dict) or not {"results", "checks", "settings"} <= set(run):
        raise ValueError(f"flash_csa.accuracy: {path} must be a results.json of this command")
    return run


def regressions(
    run: Mapping[str, Any], baseline: Mapping[str, Any], tolerance: float = TOLERANCE
) -> list[Regression]:
    """What got worse since `baseline`, by axis in the order of the data flow, worst first.

    Raises:
        ValueError: the runs draw different inputs, or have no table in common.
    """
    for name in SAME:
        ours, theirs = (_plain(each["settings"][name]) for each in (run, baseline))
        if ours != theirs:
            raise ValueError(
                f"flash_csa.accuracy: the baseline's {name} must be {ours}, got {theirs}"
            )
    views = [{tuple(r[k] for k in VIEW) for r in each["results"]} for each in (run, baseline)]
    if not views[0] & views[1]:
        raise ValueError("flash_csa.accuracy: the baseline has none of this run's tables")
    found = [*_checks(run, baseline), *_results(run, baseline, tolerance)]
    order = {axis: number for number, axis in enumerate(AXES)}
    return sorted(found, key=lambda r: (order.get(r.axis, len(order)), -r.size, r.what))


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(value))


def _checks(run: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[Regression]:
    key = ("backend", "axis", "name")
    now = {tuple(c[k] for k in key): c for c in run["checks"]}
    found = []
    backends = {check["backend"] for check in run["checks"]}
    for before in baseline["checks"]:
        if before["backend"] not in backends:
            continue
        after = now.get(tuple(before[k] for k in key))
        if before["holds"] and not (after and after["holds"]):
            value = None if after is None else after["value"]
            what = f"{before['backend']}: {before['name']}"
            found.append(Regression(before["axis"], what, before["value"], value))
    return found


def _results(
    run: Mapping[str, Any], baseline: Mapping[str, Any], tolerance: float
) -> list[Regression]:
    now = {tuple(r[k] for k in KEY): r for r in run["results"]}
    measured = {key[: len(VIEW)] for key in now}
    axes = baseline["experiments"]
    found = []
    for before in baseline["results"]:
        key = tuple(before[k] for k in KEY)
        if key[: len(VIEW)] not in measured:
            continue
        after = now.get(key)
        if after is None or _worse(before, after["value"], tolerance):
            axis = axes[before["experiment"]]["axis"]
            value = None if after is None else after["value"]
            found.append(Regression(axis, ", ".join(map(str, key)), before["value"], value))
    return found


def _worse(before: Mapping[str, Any], value: float, tolerance: float) -> bool:
    change = value - before["value"]
    if before["better"] == "higher":
        change = -change
    floor = SHARE_FLOOR if METRICS[before["metric"]].high == 1 else ERROR_FLOOR
    return not change <= max(floor, tolerance * abs(before["value"]))
