"""Runs units, one experiment on one input each, and keeps what is done in a file beside the report,
so that an interrupted run goes on where it was."""

import fcntl
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch

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
        ValueError: nothing is left to measure, or two inputs of one name.
    """
    labels = [inputs.label(name) for name in settings.inputs]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"flash_csa.accuracy: inputs need names of their own, got two {label}")
    found = [Unit("truths", "", 0, backend) for backend in settings.backends]
    long = False
    for backend in settings.backends:
        for name in settings.inputs:
            held = inputs.length(name)
            for context in settings.contexts:
                if held is None or context <= held:
                    found += _units_of(settings, name, context, backend)
                    long = True
    if not long:
        raise ValueError("flash_csa.accuracy: no input holds as many tokens as --context asks for")
    if len(found) == len(settings.backends):
        raise ValueError("flash_csa.accuracy: none of the experiments measures these inputs")
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
    settings are taken from there. `advance` after each. Returns what results.json holds.

    Raises:
        ValueError: `folder` cannot be written, or another run is writing there.
    """
    planned, cases = units(settings), _Cases(settings, make_backend)
    mark = fingerprint(settings)
    lines = []
    with _open(folder) as file:
        done = _read(file, mark)
        for unit in planned:
            line = done.get(unit)
            if line is None:
                line = _measure(unit, settings, cases)
                kept = {"fingerprint": mark, "unit": asdict(unit)} | line
                file.write(json.dumps(kept).encode() + b"\n")
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


def _open(folder: Path) -> IO[bytes]:
    """The units file, locked until it is closed or the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / UNITS_FILE).open("a+b")
    except OSError as error:
        raise ValueError(f"flash_csa.accuracy: cannot write {folder}: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ValueError(f"flash_csa.accuracy: another run is writing to {folder}") from error
    except OSError:  # a file system without locks
        pass
    return file


def _read(file: IO[bytes], mark: str) -> dict[Unit, dict[str, Any]]:
    """Units of the same fingerprint; what else stands in the file does not count, and a last line
    that was cut short is taken away."""
    file.seek(0)
    data = file.read()
    file.truncate(data.rfind(b"\n") + 1)
    found = (_kept(line, mark) for line in data.split(b"\n")[:-1])
    return dict(unit for unit in found if unit is not None)


def _kept(text: bytes, mark: str) -> tuple[Unit, dict[str, Any]] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or line.pop("fingerprint", None) != mark:
        return None
    return Unit(**line.pop("unit")), line


def instructions(settings: Settings) -> str:
    """Of the kernels that a run measures: the instruction level of the CPU, or the device."""
    return f"CPU, {_C.cpu_level()}" if settings.device == "cpu" else settings.device


def fingerprint(settings: Settings) -> str:
    """Of settings, instructions, captures, this package, the library, PyTorch and modules of back
    ends: what results depend on."""
    told = [asdict(settings), instructions(settings), torch.__version__]
    digest = hashlib.sha256(json.dumps(told).encode())
    package = Path(__file__).parent.parent
    files = sorted(p for p in package.rglob("*.py") if package / "cli" not in p.parents)
    files += [path for name in settings.inputs if (path := inputs.path_of(name)) is not None]
    files += [path for name in settings.backends if (path := _module(name)) is not None]
    for path in (*files, Path(_C.__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _module(backend: str) -> Path | None:
    """The file of a back end by module:Class."""
    name, colon, _ = backend.partition(":")
    try:
        found = importlib.util.find_spec(name) if name and colon else None
    except (ImportError, ValueError):  # make_backend says so
        return None
    return Path(found.origin) if found and found.has_location else None
