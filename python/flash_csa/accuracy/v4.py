"""What V4 alone has, as stages: its indexer's own compressor, Hadamard rotation, norm of queries,
attention over all visible entries (HCA)."""

from collections.abc import Iterator

import torch

from ..plan import INDEX_DIM
from ..reference import index
from ..reference.compress import Compressor, rms_norm, v4_index_keys
from ..reference.quant import round_bf16
from ..reference.rope import rotate
from .activations import EPS, FP32
from .backends import Stored
from .case import FORMULA, Case
from .checks import HELD, Check
from .codecs import differ
from .formats import INDEX_FP4, MIXED_FP8
from .metrics import relative_error

FEW = 0.02  # share that lies on a rounding border
BORDER = 0.25  # relative error of an index key there
CSA, HCA = 4, 128  # ratios
ROUNDING = 6e-3  # BF16 probabilities and output


def compare(case: Case) -> Iterator[Check]:
    """All of them, if the back end has them."""
    if hasattr(case.backend, "compress_index"):
        yield from _keys(case)
        yield from _queries(case)
        yield from _attention(case)


def _keys(case: Case) -> Iterator[Check]:
    inputs, random = case.inputs, torch.Generator().manual_seed(0)
    kv, gate = (x[:, : 2 * INDEX_DIM].contiguous() for x in (inputs.kv, inputs.gate))
    bias = torch.randn(CSA, 2 * INDEX_DIM, generator=random).to(inputs.device)
    weight = (0.5 + torch.rand(INDEX_DIM, generator=random)).to(inputs.device)
    compressor = Compressor(CSA, weight, EPS, bias, overlap=True, precision=FP32)
    rows = v4_index_keys(compressor, kv, gate, case.cos_sin)
    made = case.backend.compress_index(kv, gate, CSA, case.cos_sin, bias, weight)
    # Its codec cancels out, wherever it is wrong.
    own, exact = case.backend.store(rows, INDEX_FP4).values, INDEX_FP4.round_trip(rows)
    errors = torch.minimum(*(relative_error(made.values, each) for each in (own, exact)))
    name = "V4's own index compressor, records"
    share = (errors > 0).double().mean().item()
    yield Check("index keys", f"{name} that differ", share, 0.0, FEW, len(errors), HELD)
    worst = errors.max().item()
    yield Check("index keys", f"{name}, worst error", worst, 0.0, BORDER, len(errors), HELD)


def _queries(case: Case) -> Iterator[Check]:
    layer, where = case.inputs.layers[0], case.where()
    query = case.backend.query(layer.index_q, where, case.cos_sin, INDEX_FP4, rotate=True)
    given = layer.index_q.cpu(), case.positions.cpu(), case.cos_sin.cpu()
    exact = index.dequantize_query(index.quantize_query(*given, rotate_hadamard=True))
    share = differ(query.values.cpu(), exact)
    name = "rotated by Hadamard, values that differ"
    yield Check("index queries", name, share, 0.0, 0.0, exact.numel(), HELD)
    rows = case.inputs.window_kv[case.positions]
    q, _ = case.backend.rope_store(layer.q, rows, case.positions, case.cos_sin, q_norm_eps=EPS)
    normed = rotate(round_bf16(rms_norm(layer.q, None, EPS)), case.positions, case.cos_sin)
    share = differ(q, normed)
    name = "queries normed and rotated, values that differ"
    yield Check("attention", name, share, 0.0, FEW / 10, q.numel(), HELD)


def _attention(case: Case) -> Iterator[Check]:
    """Rows of HCA attend every entry that they see, without list or indexer; the window's records
    are those of main KV."""
    main, where, recent = case.main(MIXED_FP8, HCA), case.where(HCA), case.window_lists()
    sink, q, rows = case.inputs.layers[0].sink, case.q(0), case.inputs.window_kv
    tokens = torch.arange(len(rows), device=q.device)
    _, window = case.backend.rope_store(
        rows[:, None][:, :0], rows, tokens, case.cos_sin, variant=MIXED_FP8
    )
    stored = case.backend.store(rotate(rows, tokens, case.cos_sin), MIXED_FP8)
    share = differ(window.values, stored.values)
    name = "V4's record, values rotated and stored that differ"
    yield Check("window KV", name, share, 0.0, 0.0, len(rows), HELD)
    out = case.backend.attend_visible(q, main, where, window, recent, sink)
    columns = torch.arange(case.size(HCA), device=q.device).expand(len(q), -1)
    lists = torch.where(columns < where.n_vis[:, None], columns, -1)
    same = [Stored(each.values, each.variant) for each in (main, window)]
    expected = FORMULA.attend(q, same[0], lists, same[1], recent, sink)
    worst = relative_error(out, expected).max().item()
    name = "all visible entries, worst row"
    yield Check("attention", name, worst, 0.0, ROUNDING, len(q), HELD)
