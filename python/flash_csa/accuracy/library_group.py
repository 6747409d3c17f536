"""A whole group through the library's layers and cache: what a serving loop would run."""

from dataclasses import replace

import torch
from torch import Tensor

from ..batch import Batch
from ..cache import BlockPool, CacheSpec
from ..configs import V41_FLASH
from ..group import Compressor, Group, Query, Step, Tokens, store_window
from ..plan import LayerPlan
from ..reference.quant import round_bf16
from ..reference.rope import rotate
from .activations import EPS, Activations


def plan_of(inputs: Activations, k: int, pool_blocks: int) -> LayerPlan:
    """The group's plan, at ratio 1."""
    layers = len(inputs.layers)
    sources = [n for n, mode in enumerate(inputs.modes) if mode != "reuse"]
    fields = {
        "num_hidden_layers": layers,
        "compress_ratios": [1] * layers,
        "kv_source_layer_ids": [0],
        "index_source_layer_ids": sources,
        "candidate_source_layer_id": 0 if len(sources) > 1 else None,
        "candidate_topk_blocks": pool_blocks,
        "num_attention_heads": inputs.layers[0].q.shape[1],
        "index_n_heads": inputs.layers[0].index_q.shape[1],
        "index_topk": k,
    }
    return replace(LayerPlan.from_config({**V41_FLASH, **fields}), eps=EPS)


def run_group(inputs: Activations, k: int, pool_blocks: int, cos_sin: Tensor) -> list[Tensor]:
    """f32 [Q, H, 512] of each layer, as `Formula.attend` gives it: the tokens between two query
    rows are stored as a chunk, every query row is a decode step."""
    plan, device = plan_of(inputs, k, pool_blocks), inputs.device
    positions = inputs.positions.tolist()
    gaps = [b - a for a, b in zip([-1, *positions], positions, strict=False)]
    layout = CacheSpec.for_plan(plan).layout(plan, max_tokens=inputs.tokens, max_rows=max(gaps))
    cache = layout.allocate(device)
    pages = BlockPool(layout, device=device, span_order=range(layout.num_spans)[::-1])
    weights = Compressor(
        norm=inputs.norm_weight, key=inputs.key_weight, key_norm=inputs.key_norm_weight
    )
    group = Group(cache, 0, cos_sin=cos_sin, compressor=weights)
    kv = round_bf16(inputs.kv)
    steps: dict[int, Step] = {}
    outs: list[list[Tensor]] = [[] for _ in inputs.layers]

    def begin(start: int, rows: int) -> Step:
        pages.reserve(0, start, rows)
        batch = Batch.build([start], [rows], device=device)
        if rows not in steps:
            steps[rows] = Step(cache, batch, pages.block_tables, pages.window_table)
        return steps[rows].begin(batch)

    stored = 0
    for row, position in enumerate(positions):
        if position > stored:
            step = begin(stored, position - stored)
            group.compress(step, Tokens(kv[stored:position]))
            for layer in plan.layers:
                window = inputs.window_kv[stored:position]
                store_window(cache, layer.index, step, window, cos_sin)
        step = begin(position, 1)
        for layer in plan.layers:
            query, mode = _query(inputs, layer.index, row, position), getattr(group, layer.mode)
            tokens = [Tokens(kv[position : position + 1])] if layer.mode == "full" else []
            outs[layer.index].append(mode(layer.index, step, query, *tokens))
        stored = position + 1
    # The library turns its output back; the formulas do not.
    return [rotate(torch.cat(rows), inputs.positions, cos_sin).float() for rows in outs]


def _query(inputs: Activations, layer: int, row: int, position: int) -> Query:
    queries = inputs.layers[layer]
    return Query(
        q=queries.q[row : row + 1].clone(),
        window_kv=inputs.window_kv[position : position + 1],
        sink=queries.sink,
        index_q=queries.index_q[row : row + 1],
        index_weights=queries.index_weights[row : row + 1],
    )
