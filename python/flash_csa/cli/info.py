"""`python -m flash_csa info`: what this build is and what runs here."""

import platform
from typing import Annotated, Any

import torch
import typer

import flash_csa

from .. import _C
from ..accounting import spec_bytes_per_token
from ..cache import CacheSpec
from ..configs import BY_NAME
from ..plan import LayerPlan
from ..records import RECORDS
from . import output
from .support import MAX_HEADS, supported

# What a list of values does not say.
NOTES = {
    "ratios": "of layers that compress; 0, window only, needs nothing of its own",
    "main_records": "selected and compressed KV",
    "heads": f"of attention; no limit, tried up to {MAX_HEADS}; on a GPU padded inside to 8, 16, "
    "32 or blocks of 64",
    "index_heads": "any number up to the limit",
    "topk": "any number up to the limit",
    "page_sizes": "records of a page, any number up to the limit",
}


def command(
    probe: Annotated[
        bool, typer.Option(help="Run a kernel on every GPU (initialises CUDA).")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Versions, back ends, devices, and the variants that run on them."""
    result = collect(probe)
    if as_json:
        output.print_json(result)
    else:
        _print(result)


def collect(probe: bool = True) -> dict[str, Any]:
    """What `info` prints, as JSON holds it."""
    gpus = torch.cuda.device_count()  # initialises no CUDA context
    ask_gpus = probe and _C.HAS_CUDA and gpus > 0
    return {
        "versions": {
            "flash_csa": flash_csa.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "back_ends": {"cpu": _C.cpu_level(), "cuda": "sm_90a" if _C.HAS_CUDA else None},
        "devices": {
            "cpu_threads": torch.get_num_threads(),
            "gpus": gpus,
            "probed": [_probe(index) for index in range(gpus)] if ask_gpus else [],
        },
        "records": {record.name: record.bytes for record in RECORDS.values()},
        "models": {name: _bytes_per_token(name) for name in BY_NAME},
        "supported": {"cpu": supported("cpu")} | ({"cuda": supported("cuda")} if ask_gpus else {}),
    }


def _bytes_per_token(model: str) -> float:
    plan = LayerPlan.from_config(model)
    return float(spec_bytes_per_token(plan, CacheSpec.for_plan(plan)))


def _probe(index: int) -> dict[str, Any]:
    """A GPU, and whether this build's device code runs there and knows the record table."""
    properties = torch.cuda.get_device_properties(index)
    words = torch.zeros(1 + len(RECORDS), dtype=torch.int32, device=f"cuda:{index}")
    try:
        torch.ops.flash_csa.probe(words)
        sizes = words[1:].tolist()  # waits for the kernel
        expected = [record.bytes for record in RECORDS.values()]
        status = "runs" if sizes == expected else f"wrong record sizes {sizes}"
    except (RuntimeError, ValueError) as error:
        status = str(error).splitlines()[0]
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_nbytes": properties.total_memory,
        "sms": properties.multi_processor_count,
        "status": status,
    }


def _print(result: dict[str, Any]) -> None:
    console = output.console()
    versions, back_ends, devices = (result[k] for k in ("versions", "back_ends", "devices"))
    cuda = back_ends["cuda"] or "not compiled in"
    models = (f"{name} {count:,.10g} bytes/token" for name, count in result["models"].items())
    sizes = (f"{name} {nbytes} B" for name, nbytes in result["records"].items())
    facts = {
        "versions": ", ".join(f"{name} {value}" for name, value in versions.items()),
        "back ends": f"CPU ({back_ends['cpu']}), CUDA ({cuda})",
        "CPU": f"{devices['cpu_threads']} threads",
        "GPUs": _gpus(devices),
        "records": ", ".join(sizes),
        "models": ", ".join(models),
    }
    console.print(output.facts(facts))
    console.print()

    columns = list(result["supported"])
    variants = output.table("supported", *columns, "")
    for axis in result["supported"]["cpu"]:
        cells = [", ".join(map(str, result["supported"][name][axis])) for name in columns]
        cells = [cell or "none yet" for cell in cells]
        variants.add_row(axis.replace("_", " "), *cells, NOTES.get(axis, ""))
    console.print(variants)


def _gpus(devices: dict[str, Any]) -> str:
    if not devices["probed"]:
        return f"{devices['gpus']}, not probed" if devices["gpus"] else "none"
    return "\n".join(
        f"{gpu['name']} ({gpu['capability']}, {output.size(gpu['memory_nbytes'])}, "
        f"{gpu['sms']} SMs): {gpu['status']}"
        for gpu in devices["probed"]
    )
