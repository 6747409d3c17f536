"""Inputs by name or file: captures of real activations, and the built-in sets.

A capture is a safetensors file with these tensors (T tokens, Q query rows, L layers):

    hidden_states              bf16 or f32 [T, width]    input of one attention layer, or
    layers.N.hidden_states     bf16 or f32 [T, width]    of every layer N = 0 ... L - 1; or
    kv                         [T, 512]                  a compressor's input, with
      positions                i32 [Q]                   rows that have queries, ascending
      layers.N.q               [Q, H, 512]               before RoPE
      layers.N.index_q         [Q, Hi, 128]              before RoPE
      layers.N.index_weights   [Q, Hi]                   all factors included
      key_weight               [128, 512]                latent to index key
      and optionally gate, window_kv [T, 512], norm_weight [512], key_norm_weight [128],
      layers.N.sink [H]

Other tensors are ignored. Metadata `origin`, `model`, `model_license`, `text`, `text_license` are
shown in the report. With hidden states alone the weights are drawn (drawn.py).
"""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..plan import HEAD_DIM, INDEX_DIM
from ..reference.quant import round_bf16
from .activations import Activations, Queries, Shape, layer_modes, normed
from .drawn import draw_group
from .planted import planted
from .synthetic import SINK, gaussian, heavy

SHIPPED = Path(__file__).resolve().parent.parent / "data" / "real_hidden.safetensors"
CAPTURE = "capture"
SETS: dict[str, Callable[..., Activations]] = {
    "gaussian": gaussian,
    "heavy-tailed": heavy,
    "planted": planted,
}
FACTS = ("origin", "model", "model_license", "text", "text_license")
SHIPPED_ORIGIN = (
    "layer 3 of all-MiniLM-L6-v2 (Apache-2.0) on licence texts (Apache-2.0, CC0-1.0) and standard "
    "library docstrings (PSF-2.0); weights drawn"
)


def make(name: str, tokens: int, shape: Shape, seed: int, device: str) -> Activations:
    """Activations of a built-in set, the shipped capture ("capture") or a capture file.

    Raises:
        ValueError: no such set or file, a bad tensor, fewer tokens than asked for.
    """
    if name in SETS:
        return SETS[name](tokens, shape, seed, device)
    path = path_of(name)
    tensors, facts = read(path)
    states = _states(tensors)
    if states:
        _enough(path, len(states[0]), tokens)
        origin = SHIPPED_ORIGIN if name == CAPTURE else _origin(facts, "weights drawn")
        return draw_group([x[:tokens] for x in states], label(name), origin, shape, seed, device)
    return _exact(
        path, tensors, label(name), _origin(facts, "captured queries and keys"), tokens, device
    )


def path_of(name: str) -> Path | None:
    """The file of a capture; None: a built-in set."""
    if name in SETS:
        return None
    return SHIPPED if name == CAPTURE else Path(name)


def label(name: str) -> str:
    """What the report calls it."""
    return name if name in SETS or name == CAPTURE else Path(name).stem


def length(name: str) -> int | None:
    """Tokens of a capture; None: a set of any length."""
    if name in SETS:
        return None
    tensors, _ = read(path_of(name))
    states = _states(tensors)
    return len(states[0]) if states else len(tensors["kv"])


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file.

    Raises:
        ValueError: no such file, none of the tensors above, a shape that does not fit, NaN or Inf.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"flash_csa.accuracy: cannot read {path}: {error}") from error
    if not _states(tensors) and "kv" not in tensors:
        wanted = "hidden_states, layers.N.hidden_states or kv"
        raise _error(path, f"a tensor {wanted}", sorted(tensors))
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise _error(path, f"finite values in {name}", "NaN or Inf")
    _check_shapes(path, tensors)
    return tensors, facts


def _check_shapes(path: Path, tensors: dict[str, Tensor]) -> None:
    """Of all but the queries of layers."""
    states = _states(tensors)
    tokens = len(torch.atleast_1d(states[0] if states else tensors["kv"]))
    shapes = {
        "kv": (tokens, HEAD_DIM),
        "gate": (tokens, HEAD_DIM),
        "window_kv": (tokens, HEAD_DIM),
        "norm_weight": (HEAD_DIM,),
        "key_weight": (INDEX_DIM, HEAD_DIM),
        "key_norm_weight": (INDEX_DIM,),
    }
    for state in states:
        if state.dim() != 2 or len(state) != tokens or not state.shape[1]:
            raise _error(path, f"hidden states of [{tokens}, width]", list(state.shape))
    if states:
        return
    for name, shape in shapes.items():
        if name in tensors and tensors[name].shape != shape:
            raise _error(path, f"{name} of {list(shape)}", list(tensors[name].shape))
    positions = tensors.get("positions")
    if positions is not None:
        steps = positions.flatten().long().diff(prepend=torch.tensor([-1]))
        if positions.dim() != 1 or not (steps > 0).all():
            raise _error(path, "positions that ascend from 0 or more", "others")


def _states(tensors: dict[str, Tensor]) -> list[Tensor]:
    if "hidden_states" in tensors:
        return [tensors["hidden_states"]]
    return list(_numbered(tensors, "hidden_states").values())


def _numbered(tensors: dict[str, Tensor], what: str) -> dict[int, Tensor]:
    """layers.N.`what`, by N ascending."""
    found = [re.fullmatch(rf"layers\.(0|[1-9][0-9]*)\.{what}", name) for name in tensors]
    return {n: tensors[f"layers.{n}.{what}"] for n in sorted(int(m[1]) for m in found if m)}


def _exact(
    path: Path, tensors: dict[str, Tensor], name: str, origin: str, tokens: int, device: str
) -> Activations:
    """A capture of the attention's own inputs."""
    kv = tensors["kv"].float()
    _enough(path, len(kv), tokens)
    numbers = _numbered(tensors, "q")
    for wanted in ("positions", "key_weight"):
        if wanted not in tensors:
            raise _error(path, f"a tensor {wanted}", sorted(tensors))
    if not numbers:
        raise _error(path, "tensors layers.N.q", sorted(tensors))
    positions = tensors["positions"].long()
    kept = positions < tokens
    if kept.sum() < 2:
        raise _error(path, f"two positions below {tokens}", int(kept.sum()))
    layers = [_layer(path, tensors, number, kept, device) for number in numbers]
    kv = kv[:tokens].to(device)

    def optional(what: str, default: Tensor) -> Tensor:
        return tensors[what].to(device)[: len(default)] if what in tensors else default

    return Activations(
        name=name,
        origin=origin,
        positions=positions[kept].to(device),
        kv=kv,
        gate=optional("gate", torch.zeros_like(kv)).float(),
        window_kv=round_bf16(optional("window_kv", normed(kv))),
        norm_weight=optional("norm_weight", torch.ones(HEAD_DIM, device=device)).float(),
        key_weight=round_bf16(tensors["key_weight"].to(device)),
        key_norm_weight=optional("key_norm_weight", torch.ones(INDEX_DIM, device=device)).float(),
        layers=tuple(layers),
        modes=layer_modes(len(layers)),
    )


def _layer(path: Path, tensors: dict, number: int, kept: Tensor, device: str) -> Queries:
    def of(what: str, shape: tuple[int | None, ...]) -> Tensor:
        tensor = tensors.get(f"layers.{number}.{what}")
        got = None if tensor is None else list(tensor.shape)
        fits = tensor is not None and tensor.dim() == len(shape)
        if not fits or any(n not in (None, m) for n, m in zip(shape, tensor.shape, strict=True)):
            raise _error(path, f"layers.{number}.{what} of {list(shape)}", got)
        return tensor[kept].to(device)

    rows = len(kept)
    q = of("q", (rows, None, HEAD_DIM))
    index_q = of("index_q", (rows, None, INDEX_DIM))
    weights = of("index_weights", (rows, index_q.shape[1])).float()
    sink = tensors.get(f"layers.{number}.sink", torch.full(q.shape[1:2], SINK))
    if sink.shape != q.shape[1:2]:
        raise _error(path, f"layers.{number}.sink of {list(q.shape[1:2])}", list(sink.shape))
    return Queries(round_bf16(q), round_bf16(index_q), weights, sink.float().to(device))


def _enough(path: Path, held: int, tokens: int) -> None:
    if held < tokens:
        raise _error(path, f"{tokens} tokens", held)


def _origin(facts: dict[str, str], rest: str) -> str:
    told = [f"{key}: {facts[key]}" for key in FACTS if key in facts]
    return "; ".join([*(told or ["origin and licence not stated"]), rest])


def _error(path: Path, expected: str, got: object) -> ValueError:
    return ValueError(f"flash_csa.accuracy: {path} must hold {expected}, got {got}")
