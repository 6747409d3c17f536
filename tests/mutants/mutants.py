"""The faults that tests must notice; all but CASE_MUTANTS were chosen without a look at the tests.

Sources of a release hold no trace of them: `FCSA_MUTATE=n python setup.py build_ext -b DIR/python`
builds a copy of csrc with fault n, and `make mutants` does so for each.
"""

from importlib import import_module
from pathlib import Path

from mutants.list_cases import CASE_MUTANTS
from mutants.list_index import INDEX_MUTANTS
from mutants.list_records import RECORD_MUTANTS
from mutants.list_rows import ROW_MUTANTS
from mutants.mutant import Mutant, patched, replace_once

STAGES = ("codec", "causal", "compressor", "scores", "select", "pool", "attend", "step", "merge")
CUDA_STAGES = ("store", "step", "compress", "index", "select", "attend")
MUTANTS: tuple[Mutant, ...] = (
    *RECORD_MUTANTS,
    *INDEX_MUTANTS,
    *ROW_MUTANTS,
    *CASE_MUTANTS,
)
# By the name of the list and of its kills: those of the CPU back end, and each CUDA stage's own.
LISTS: dict[str, tuple[Mutant, ...]] = {"cpu": MUTANTS} | {
    path.stem.removeprefix("list_"): import_module(f"mutants.{path.stem}").MUTANTS
    for path in sorted(Path(__file__).parent.glob("list_cuda_*.py"))
}

# Kinds of fault that kernels of a stage invite, and the faults that are of the kind.
KINDS: dict[str, dict[str, tuple[int, ...]]] = {
    "compress": {
        "missing barrier or wait": (1314,),
        "last tile": (1302,),
        "stale tail": (1303, 1304),
        "neighbouring page": (1305,),
        "missing BF16 border": (1306,),
        "wrong position of RoPE": (1312, 1315),
    },
    "index, select": {
        "lost tie": (1412, 1501),
        "dropped bin": (1502, 1531),
        "missing barrier or wait": (1441, 1503),
        "last partial page": (1401, 1422),
        "wrong scale group": (1402, 1442),
        "pool without the newest block": (1507,),
    },
    "attend": {
        "missing barrier or wait": (1661, 1668, 1691),
        "last tile": (1610, 1662, 1678),
        "mask of an absent slot": (1603, 1643, 1651, 1671, 1672),
        "stale ring stage": (1613, 1623, 1666, 1694),
        "sink twice": (1606, 1614, 1649, 1665, 1696),
        "weights of an older maximum": (1605, 1641, 1644, 1652, 1653),
        "scale of the next group": (1602, 1685),
    },
}


def cuda_lists(stage: str) -> list[str]:
    """Names of its lists: cuda_<stage>, or cuda_<stage>_<part>."""
    return [name for name in LISTS if name.split("_")[1:2] == [stage]]


def mutated_copy(number: int, csrc: Path, out: Path) -> Path:
    """Makes `out` a copy of csrc with fault `number` (0: none), which `_C.MUTANT` then names.

    Only files whose text changes are written: a build after that of another mutant compiles what
    the two faults touch and nothing else.
    """
    texts = {p.relative_to(csrc): p.read_text() for p in csrc.rglob("*") if p.is_file()}
    for mutant in (mutant for mutants in LISTS.values() for mutant in mutants):
        if mutant.number == number:
            file, module = Path(mutant.file), Path("ops/module.cpp")
            texts[file] = patched(texts[file], mutant)
            label = '"MUTANT", {})'.format
            texts[module] = replace_once(texts[module], label(0), label(number), str(module))
            break
    else:
        if number != 0:
            raise ValueError(f"no mutant has the number {number}")
    for copy in list(out.rglob("*")):
        if copy.is_file() and copy.relative_to(out) not in texts:
            copy.unlink()
    for path, text in texts.items():
        copy = out / path
        if not copy.exists() or copy.read_text() != text:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text)
    return out
