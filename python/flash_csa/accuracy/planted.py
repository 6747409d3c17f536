"""Planted evidence: needles whose content can be read back from the attention output.

A token's vector has an address (dims 0 to 255), a payload (256 to 447) and RoPE dims. A needle has
the address that its query row asks for and a code as payload; a row is answered if the codes that
correlate most with its attention output, of all that were planted, are those of its needles.

    single    one needle
    several   SEVERAL needles of one address; all must be read
    ordered   SEVERAL needles of one address that also carry their rank; the row asks for one rank
    negated   a needle, and a decoy with the opposite of the address, which must not win

Needles are placed on either side of borders: of ratio-2 groups, CSA (4) and HCA (128) groups,
pages, pool blocks, the window, and in the newest block.
"""

from itertools import product

import torch
from torch import Tensor

from ..plan import HEAD_DIM, INDEX_DIM, POOL_BLOCK, ROPE_DIMS
from ..reference.quant import round_bf16
from .activations import Activations, Evidence, Shape, layer_modes, normed, sketch
from .synthetic import Draw, Layers, Walk

KINDS = ("single", "several", "ordered", "negated")
PAGE, WINDOW = 64, 128
# First tokens of the things that a border separates: a needle lies just before or just at one.
BORDERS = {"group": 2, "csa": 4, "hca": 128, "page": PAGE, "pool block": POOL_BLOCK}
PLACES = ("inside", *BORDERS, "window", "newest block")
SEVERAL = 3
ADDRESS = 256  # dims of the address; the payload lies between it and the RoPE dims
# Share of the address in a query's energy; the rest is noise of its own in every head. Index
# heads see less of it, so that a needle is hard to find among very many tokens.
CLARITY, INDEX_CLARITY = 0.8, 0.12
GAIN = 1.5
SALIENCE = 3.0  # by how much the gate of a needle exceeds the others', as a trained one's would


def planted(tokens: int, shape: Shape, seed: int, device="cpu") -> Activations:
    """Needles in Gaussian tokens. Rows are the combinations of kind and place, both sides, over
    and over, at positions of the last eighth of the context."""
    draw = Draw(seed, device)
    positions, where = _places(tokens, shape.rows, draw)
    rows = len(positions)
    kv, gate = draw.normal(tokens, HEAD_DIM), draw.normal(tokens, HEAD_DIM)
    address, rank = draw.normal(rows, ADDRESS), draw.normal(SEVERAL, ADDRESS)
    codes = draw.normal(rows * (SEVERAL + 1), HEAD_DIM - ROPE_DIMS - ADDRESS)

    needles = torch.full((rows, SEVERAL), -1)
    decoys, answers = needles.clone(), needles.clone()
    asked = address.clone()
    taken: set[int] = set()
    for row, (kind, _, token) in enumerate(where):
        count = SEVERAL if kind in ("several", "ordered") else 1
        found = _apart(token, count + (kind == "negated"), int(positions[row]), taken, draw)
        for number, place in enumerate(found):
            code = row * (SEVERAL + 1) + number
            content = address[row]
            if kind == "ordered":
                content = (address[row] + rank[(row + number) % SEVERAL]) / 2**0.5
            if number == count:
                content, decoys[row, 0] = -address[row], place
            elif kind != "ordered" or number == 0:
                needles[row, number], answers[row, number] = place, code
            kv[place, :ADDRESS] = content
            kv[place, ADDRESS : HEAD_DIM - ROPE_DIMS] = codes[code]
            gate[place] += SALIENCE
        if kind == "ordered":
            asked[row] = (address[row] + rank[row % SEVERAL]) / 2**0.5
    key_weight = sketch(draw.random)
    return Activations(
        name="planted",
        origin="needles in independent normal values",
        positions=positions.to(draw.device),
        kv=kv,
        gate=gate,
        window_kv=normed(kv),
        norm_weight=torch.ones(HEAD_DIM, device=draw.device),
        key_weight=round_bf16(key_weight),
        key_norm_weight=torch.ones(INDEX_DIM, device=draw.device),
        layers=_layers(draw, asked, key_weight, shape),
        modes=layer_modes(shape.layers),
        evidence=Evidence(
            kinds=tuple(kind for kind, _, _ in where),
            borders=tuple(place for _, place, _ in where),
            needles=needles.to(draw.device),
            decoys=decoys.to(draw.device),
            answers=answers.to(draw.device),
            codes=codes,
            first_dim=ADDRESS,
        ),
    )


def _layers(draw: Draw, asked: Tensor, key_weight: Tensor, shape: Shape):
    """Queries that ask for the address in every layer; what drifts is their noise."""
    weight = torch.ones(HEAD_DIM, device=draw.device)
    content = torch.zeros(len(asked), 1, HEAD_DIM, device=draw.device)
    content[:, 0, :ADDRESS] = asked
    walk, layers = Walk(shape.drift), []
    made = Layers(draw, key_weight, weight, shape)
    for _ in range(shape.layers):
        own = walk.step(draw.normal(len(asked), shape.heads, HEAD_DIM))
        full = CLARITY**0.5 * content + (1 - CLARITY) ** 0.5 * own
        index = INDEX_CLARITY**0.5 * content + (1 - INDEX_CLARITY) ** 0.5 * own
        layers.append(made.next(GAIN * full, index))
    return tuple(layers)


def _places(tokens: int, rows: int, draw: Draw) -> tuple[Tensor, list[tuple[str, str, int]]]:
    """Query positions i64 [rows], and kind, place and first token of each row's evidence."""
    first = tokens - max(tokens // 8, min(tokens // 2, 4 * rows))
    rows = min(rows, tokens - first)
    positions = torch.linspace(first, tokens - 1, rows).long()
    cases = list(product(KINDS, PLACES, (0, 1)))
    # A step that is prime to their number, so that few rows already meet every kind and place.
    order = [cases[(row * 23) % len(cases)] for row in range(rows)]
    where = []
    for position, (kind, place, side) in zip(positions.tolist(), order, strict=True):
        where.append((kind, place, _token(place, side, position, draw)))
    return positions, where


def _token(place: str, side: int, position: int, draw: Draw) -> int:
    """The first needle's token; side 0 is the last one before the border, 1 the first behind it."""
    if place == "window":
        return position - WINDOW + side
    if place == "newest block":
        return position - position % POOL_BLOCK + side * (position % POOL_BLOCK)
    unit = BORDERS.get(place, 1)
    last = max(1, (position - 2 * WINDOW) // unit)
    border = int(torch.randint(1, last + 1, (1,), generator=draw.places)) * unit
    return border - 1 + side


def _apart(token: int, count: int, position: int, taken: set[int], draw: Draw) -> list[int]:
    """`token` and further random ones before the window, none of them used before."""
    found = []
    while len(found) < count:
        while token in taken:
            token = int(torch.randint(0, max(1, position - WINDOW), (1,), generator=draw.places))
        taken.add(token)
        found.append(token)
    return found
