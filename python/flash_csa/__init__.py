"""Compressed sparse attention on the 890 bytes/token cache: compress, index, select, attend.

Every op takes CPU tensors or, on an H100 or H200, CUDA tensors. Lengths, positions and tables are
tensors and are never read on the host. Importing touches no GPU. Wrong arguments raise ValueError,
one line that names op, argument, what was expected and what was given, before the op writes.
"""

import re as _re

import torch as _torch

if tuple(int(n) for n in _re.findall(r"\d+", _torch.__version__)[:2]) < (2, 11):
    raise ImportError(f"flash_csa needs PyTorch >= 2.11, found {_torch.__version__}")

from . import _C, _fakes, configs  # noqa: F401
from ._explain import explained as _explained
from .attend import attend, merge
from .batch import Batch
from .cache import BlockPool, Cache, CacheSpec, OutOfPages
from .compress import Tail, compress
from .group import Compressor, Group, Query, Step, Tokens, store_window, window_layer
from .index import IndexQuery, index_scores, quantize_query
from .plan import LayerPlan
from .records import RECORDS, Pages, Record
from .reference import rope as _rope
from .select import (
    Pool,
    Selection,
    index_select,
    merge_pools,
    merge_selections,
    normalize_pool,
    select,
)
from .sizes import SYNC_BYTES, default_num_sms, schedule_size, workspace, workspace_bytes
from .step import StepSlots, Window, schedule, step_slots
from .store import load, rope_store, store
from .validate import check

cos_sin_table = _explained()(_rope.cos_sin_table)
__version__ = "0.1.0"
__all__ = [
    "RECORDS",
    "SYNC_BYTES",
    "Batch",
    "BlockPool",
    "Cache",
    "CacheSpec",
    "Compressor",
    "Group",
    "IndexQuery",
    "LayerPlan",
    "OutOfPages",
    "Pages",
    "Pool",
    "Query",
    "Record",
    "Selection",
    "Step",
    "StepSlots",
    "Tail",
    "Tokens",
    "Window",
    "attend",
    "check",
    "compress",
    "configs",
    "cos_sin_table",
    "default_num_sms",
    "index_scores",
    "index_select",
    "load",
    "merge",
    "merge_pools",
    "merge_selections",
    "normalize_pool",
    "quantize_query",
    "rope_store",
    "schedule",
    "schedule_size",
    "select",
    "step_slots",
    "store",
    "store_window",
    "window_layer",
    "workspace",
    "workspace_bytes",
]
