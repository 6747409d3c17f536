"""What FP4 and FP8 main KV, FP4 and FP8 index keys, the candidate pool and cross-layer reuse cost
on given activations, each apart from the others. See docs/accuracy.md.

    activations, synthetic, planted, drawn   inputs: what a layer group receives
    inputs, capture, capture_hf              the same from files, and how files are made
    formats, analytic                        record variants and their expected error
    backends, compiled                       the stages: by formula, or by the library's ops
    case, metrics, stats, table              teachers and oracles, measures, intervals
    experiments                              one module for each axis
    truths, stages, options, v4, codecs, checks   what must come out, by the axis it stands on
    runner, baseline                         units, resumption; comparison of two runs
    summary, plots, html                     the report
"""

from .activations import Activations, Evidence, Queries, Shape
from .backends import Formula, Stored, Where
from .baseline import Regression, regressions
from .capture import Capture
from .case import Case
from .checks import AXES, Check, failing_axes
from .experiments import EXPERIMENTS
from .formats import Variant
from .runner import Settings, run
from .table import Result, Table

__all__ = [
    "AXES",
    "EXPERIMENTS",
    "Activations",
    "Capture",
    "Case",
    "Check",
    "Evidence",
    "Formula",
    "Queries",
    "Regression",
    "Result",
    "Settings",
    "Shape",
    "Stored",
    "Table",
    "Variant",
    "Where",
    "failing_axes",
    "regressions",
    "run",
]
