"""Runs units, one experiment on one input each, and keeps what is done in a file beside the report,
so that an interrupted run goes on where it was."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import _C, __version__
from . import inputs, stages, truths
from .activations import Shape
from .backends import Formula
from .case import Case
from .checks import Check
from .experiments import DEFAULT, EXPERIMENTS
from .table import Result, Table

UNITS_FILE = "units.jsonl"
ROWS_AT = 32_768  # tokens up to which a run on the CPU has all its query rows; beyond, fewer
LEAST_ROWS = 8


@dataclass(frozen=True)
class Settings:
    """What a run does. k: top-k. draws: seeds of weights and of built-in sets."""

    inputs: tuple[str, ...] = (inputs.CAPTURE, "planted")
    contexts: tuple[int, ...] = (4096,)
    experiments: tuple[str, ...] = DEFAULT
    k: int = 512
    draws: int = 2
    seed: int = 0
    shape: Shape = field(default_factory=lambda: Shape(rows=32))
    backends: tuple[str, ...] = ("formula",)
    device: str = "cpu"


@dataclass(frozen=True)
class Unit:
    """One line of the units file. experiment: of EXPERIMENTS, "truths" or "stages"."""

    experiment: str
    input: str
    context: int
    backend: str

    @property
    def label(self) -> str:
        where = f" on {Path(self.input).stem}, {self.context:,} tokens" if self.input else ""
        return f"{self.experiment}{where}, {self.backend}"


def units(settings: Settings) -> list[Unit]:
    """What a run consists of, in order; a capture is measured at the contexts that it holds.

    Raises:
        ValueError: nothing is left to measure.
    """
    found = [Unit("truths", "", 0, backend) for backend in settings.backends]
    for backend in settings.backends:
        for name in settings.inputs:
            held = inputs.length(name)
            for context in settings.contexts:
                if held is None or context <= held:
                    found += _units_of(settings, name, context, backend)
    if len(found) == len(settings.backends):
        raise ValueError("flash_csa.accuracy: no input holds as many tokens as --context asks for")
    return found


def _units_of(settings: Settings, name: str, context: int, backend: str) -> Iterator[Unit]:
    if backend != "formula" and name != "planted":
        yield Unit("stages", name, context, backend)
    for experiment in settings.experiments:
        sets = EXPERIMENTS[experiment].sets
        fits = name != "planted" if sets is None else name in sets
        if fits or (name == "planted" and experiment == "designs"):
            yield Unit(experiment, name, context, backend)


def run(
    settings: Settings,
    folder: Path,
    make_backend: Callable[[str], Formula],
    advance: Callable[[Unit, bool], None] = lambda unit, resumed: None,
) -> dict[str, Any]:
    """All units; those that `folder` has from an earlier run of the same code, library and
    settings are taken from there. `advance` after each. Returns what results.json holds."""
    folder.mkdir(parents=True, exist_ok=True)
    path, mark = folder / UNITS_FILE, fingerprint(settings)
    done = _read(path, mark)
    planned, cases = units(settings), _Cases(settings, make_backend)
    lines = []
    with path.open("a", encoding="utf-8") as file:
        for unit in planned:
            line = done.get(unit)
            if line is None:
                line = _measure(unit, settings, cases)
                kept = {"fingerprint": mark, "unit": asdict(unit)} | line
                file.write(json.dumps(kept) + "\n")
                file.flush()
            advance(unit, unit in done)
            lines.append(line)
    return {
        "version": __version__,
        "settings": asdict(settings),
        "instructions": instructions(settings),
        "origins": {k: v for line in lines for k, v in line["origin"].items()},
        "experiments": {
            name: {"title": e.title, "axis": e.axis, "held": e.held}
            for name, e in EXPERIMENTS.items()
            if name in settings.experiments
        },
        "results": [result for line in lines for result in line["results"]],
        "histograms": [each for line in lines for each in line["histograms"]],
        "checks": [check for line in lines for check in line["checks"]],
    }


class _Cases:
    """The cases of the last unit, which the next one often shares: teachers are made once."""

    def __init__(self, settings: Settings, make_backend: Callable[[str], Formula]) -> None:
        self._settings, self._make = settings, make_backend
        self._key: tuple | None = None
        self._held: list[Case] = []

    def backend(self, unit: Unit) -> Formula:
        return self._make(unit.backend)

    def of(self, unit: Unit) -> list[Case]:
        """One for each draw."""
        settings, shape = self._settings, shape_of(self._settings, unit)
        key = (unit.input, unit.context, unit.backend, shape)
        if key != self._key:
            self._held.clear()  # before the next ones are made
            backend = self.backend(unit)
            for draw in range(settings.draws):
                seed = settings.seed + draw
                made = inputs.make(unit.input, unit.context, shape, seed, settings.device)
                self._held.append(Case(made, settings.k, backend))
            self._key = key
        return self._held


def _measure(unit: Unit, settings: Settings, cases: _Cases) -> dict[str, Any]:
    if unit.experiment == "truths":
        found = truths.check(cases.backend(unit), settings.seed, settings.device)
        return _line(checks=found, backend=unit.backend)
    held = cases.of(unit)
    label = held[0].inputs.name
    origin = {label: held[0].inputs.origin}
    if unit.experiment == "stages":
        return _line(checks=stages.compare(held[0]), origin=origin, backend=unit.backend)
    table = Table(unit.experiment, label, unit.context, unit.backend)
    for case in held:
        EXPERIMENTS[unit.experiment].measure(case, table)
    return _line(results=table.results(), histograms=table.histograms(), origin=origin)


def shape_of(settings: Settings, unit: Unit) -> Shape:
    """Fewer query rows at long contexts; more layers where the experiment needs them."""
    rows = settings.shape.rows
    if settings.device == "cpu":
        rows = rows * ROWS_AT // max(unit.context, ROWS_AT)
    shape = replace(settings.shape, rows=max(min(LEAST_ROWS, settings.shape.rows), rows))
    experiment = EXPERIMENTS.get(unit.experiment)
    layers = None if experiment is None else experiment.layers
    return replace(shape, layers=layers or shape.layers)


def _line(
    *,
    results: list[Result] = (),
    histograms: list[dict] = (),
    checks: list[Check] = (),
    origin: dict[str, str] | None = None,
    backend: str = "",
) -> dict[str, Any]:
    return {
        "results": [asdict(result) for result in results],
        "histograms": list(histograms),
        "checks": [asdict(c) | {"holds": c.holds, "backend": backend} for c in checks],
        "origin": origin or {},
    }


def _read(path: Path, mark: str) -> dict[Unit, dict[str, Any]]:
    """Whole lines of the same fingerprint; the last one may have been cut short."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        path.write_text(text, encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return {Unit(**line.pop("unit")): line for line in lines if line.pop("fingerprint") == mark}


def instructions(settings: Settings) -> str:
    """Of the kernels that a run measures: the instruction level of the CPU, or the device."""
    return f"CPU, {_C.cpu_level()}" if settings.device == "cpu" else settings.device


def fingerprint(settings: Settings) -> str:
    """Of settings, instructions, captures, this package and the library: what results depend on."""
    digest = hashlib.sha256(json.dumps([asdict(settings), instructions(settings)]).encode())
    files = sorted(Path(__file__).parent.rglob("*.py"))
    files += [Path(name) for name in settings.inputs if Path(name).is_file()]
    for path in (*files, Path(_C.__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()
