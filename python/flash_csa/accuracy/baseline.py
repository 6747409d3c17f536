"""Two runs side by side: what got worse, by the axis it belongs to.

A result regresses if it is worse than the baseline's by more than `tolerance` of it and by more
than a floor (`ERROR_FLOOR` of an error, `SHARE_FLOOR` of a share). Runs of the same settings draw
the same inputs, so sampling does not enter; the floors leave room for another order of summation. A
check that held and fails regresses, and so does a result that is missing from a table of both runs
or has fewer rows.
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
    if not _well_formed(run):
        raise ValueError(f"flash_csa.accuracy: {path} must be a results.json of this command")
    return run


def _well_formed(run: Any) -> bool:
    """All that a comparison reads is there."""
    try:
        for check in run["checks"]:
            _ = [check[k] for k in ("backend", "axis", "name", "value", "holds")]
        for result in run["results"]:
            hash(tuple(result[k] for k in (*KEY, "better")))
            _ = METRICS[result["metric"]], run["experiments"][result["experiment"]]["axis"]
            if not isinstance(result["value"], int | float | None) or result["n"] < 1:
                return False
        return set(SAME) <= set(run["settings"])
    except (KeyError, TypeError):
        return False


def comparable(settings: Mapping[str, Any], baseline: Mapping[str, Any]) -> None:
    """Raises:
    ValueError: a run of these settings draws other inputs than the baseline's.
    """
    for name in SAME:
        ours, theirs = (_plain(each[name]) for each in (settings, baseline["settings"]))
        if ours != theirs:
            raise ValueError(
                f"flash_csa.accuracy: the baseline's {name} must be {ours}, got {theirs}"
            )


def regressions(
    run: Mapping[str, Any], baseline: Mapping[str, Any], tolerance: float = TOLERANCE
) -> list[Regression]:
    """What got worse since `baseline`, by axis in the order of the data flow, worst first.

    Raises:
        ValueError: the runs draw different inputs, or have no table in common.
    """
    comparable(run["settings"], baseline)
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
        value = None if after is None else after["value"]
        axis, what = axes[before["experiment"]]["axis"], ", ".join(map(str, key))
        if _worse(before, value, tolerance):
            found.append(Regression(axis, what, before["value"], value))
        elif after is not None and after["n"] < before["n"]:  # rows without a finite value
            found.append(Regression(axis, f"{what}, rows", before["n"], after["n"]))
    return found


def _worse(before: Mapping[str, Any], value: float | None, tolerance: float) -> bool:
    """None: missing, or not finite."""
    if value is None or before["value"] is None:
        return before["value"] is not None
    change = value - before["value"]
    if before["better"] == "higher":
        change = -change
    floor = SHARE_FLOOR if METRICS[before["metric"]].high == 1 else ERROR_FLOOR
    return not change <= max(floor, tolerance * abs(before["value"]))
