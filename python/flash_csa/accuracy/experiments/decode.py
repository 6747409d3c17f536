"""The error after long decode: outputs feed back into the next token, so errors may add up.

Every query row starts a chain of its own after the sequence. A step's output, as mean of the heads,
is added to the next token's vector and to its queries. The chains run twice, with everything in
BF16 and FP32, and with the model's formats; what differs is their outputs at the same step.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..activations import normed
from ..backends import Stored, Where, softmax_attend
from ..case import FORMULA, Case
from ..formats import BF16_MAIN, INDEX_BF16, INDEX_FP4, MAIN_FP4, MAIN_FP8, Variant
from ..metrics import relative_error
from ..planted import WINDOW
from ..table import Table

HELD = "layer 0, ratio 1, the tokens before the chains; feedback 0.5 of a token's energy"
STEPS = 256
REPORTED = (1, 4, 16, 64, 256)
FEEDBACK = 0.5
CHAINS = 16


@dataclass
class _Chain:
    """One run: formats, and the chains' own records, one tensor a step."""

    main: Variant
    index: Variant
    window: Variant
    recent: list[Tensor] = field(default_factory=list)
    older: list[Tensor] = field(default_factory=list)
    out: Tensor | None = None  # f32 [B, H, 512] of the last step


def measure(case: Case, table: Table) -> None:
    chains = slice(0, min(CHAINS, len(case.positions)))
    exact = _Chain(BF16_MAIN, INDEX_BF16, BF16_MAIN)
    runs = {
        "FP4 KV, FP8 window": _Chain(MAIN_FP4, INDEX_BF16, MAIN_FP8),
        "FP4 index": _Chain(BF16_MAIN, INDEX_FP4, BF16_MAIN),
        "FP4 KV and index, FP8 window": _Chain(MAIN_FP4, INDEX_FP4, MAIN_FP8),
    }
    random = torch.Generator(case.inputs.device).manual_seed(STEPS)
    for step in range(1, STEPS + 1):
        size = (CHAINS, case.inputs.kv.shape[1])
        token = torch.randn(size, generator=random, device=case.inputs.device)[chains]
        for run in (exact, *runs.values()):
            _step(case, run, token, chains)
        if step in REPORTED:
            for name, run in runs.items():
                errors = torch.full((len(case.positions),), torch.nan)
                errors[chains] = relative_error(run.out, exact.out).cpu()
                variant = f"{name}, step {step}"
                table.put(case, variant, "output error", 0, errors, step=step)


def _step(case: Case, run: _Chain, token: Tensor, chains: slice) -> None:
    """One token of every chain: its record, its selection of the sequence, its output."""
    queries = case.inputs.layers[0]
    fed = 0.0 if run.out is None else normed(run.out.mean(1)).float()
    vector = normed((1 - FEEDBACK) ** 0.5 * token + FEEDBACK**0.5 * fed)
    run.recent.append(vector)
    if len(run.recent) > WINDOW:
        run.older.append(run.main.round_trip(run.recent.pop(0)))
    q = case.q(0)[chains].float()
    if run.out is not None:
        q = q + FEEDBACK * normed(run.out).float()
    lists = _select(case, run, queries.index_q[chains], q, chains)
    main = case.main(run.main, backend=FORMULA).values
    parts = [run.window.round_trip(torch.stack(run.recent, 1)), main[lists.clamp(min=0)]]
    absent = torch.zeros(len(q), len(run.recent), dtype=torch.bool, device=q.device)
    absent = torch.cat([absent, lists < 0], 1)
    if run.older:
        parts.append(torch.stack(run.older, 1))
        absent = torch.nn.functional.pad(absent, (0, len(run.older)))
    run.out = softmax_attend(q, torch.cat(parts, 1), absent, queries.sink)


def _select(case: Case, run: _Chain, index_q: Tensor, q: Tensor, chains: slice) -> Tensor:
    """i64 [B, k] among the sequence's entries; the index sees what has changed of the query."""
    queries = case.inputs.layers[0]
    heads = torch.arange(index_q.shape[1], device=q.device) * q.shape[1] // index_q.shape[1]
    change = (q - case.q(0)[chains].float())[:, heads] @ case.inputs.key_weight.float().T
    where = Where(case.positions[chains], 1)
    seen = (index_q.float() + change).bfloat16()
    query = FORMULA.query(seen, where, case.cos_sin, run.index)
    keys: Stored = case.keys(run.index, backend=FORMULA)
    scores = FORMULA.scores(query, keys, queries.index_weights[chains], where)
    return FORMULA.select(scores, where, case.k)
