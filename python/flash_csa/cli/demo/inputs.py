"""The hidden states that the demo feeds to every layer: a file's, or synthetic ones."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

REAL_HIDDEN = Path(__file__).resolve().parents[2] / "data" / "real_hidden.safetensors"
TENSOR = "hidden_states"
SYNTHETIC_WIDTH = 384  # of the real capture


@dataclass(frozen=True)
class Hidden:
    """states: bf16 [rows, width]. origin: what they are, for people."""

    states: torch.Tensor
    origin: str

    def first(self, rows: int) -> torch.Tensor:
        """The first `rows` rows; after its last row the input starts again."""
        return self.states[torch.arange(rows) % len(self.states)]


def read_hidden(path: Path, tokens: int) -> Hidden:
    """`hidden_states` of a safetensors file, at least `tokens` rows.

    Raises:
        ValueError: no such file or tensor, another dtype or shape, too few rows, NaN or Inf.
    """
    try:
        with safe_open(path, framework="pt") as file:
            if TENSOR not in file.keys():  # noqa: SIM118 (the file is no mapping)
                raise _error(f"{path} must hold a tensor {TENSOR}", sorted(file.keys()))
            states = file.get_tensor(TENSOR)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"flash_csa.demo: cannot read {path}: {error}") from error
    got = f"{states.dtype} {list(states.shape)}"
    if states.dtype != torch.bfloat16 or states.dim() != 2 or states.shape[1] < 1:
        raise _error(f"{TENSOR} of {path} must be bfloat16 [tokens, width]", got)
    if not states.isfinite().all():
        raise _error(f"{TENSOR} of {path} must be finite", "NaN or Inf")
    if len(states) < tokens:
        raise _error(f"{path} must hold {tokens} tokens (or use --synthetic)", len(states))
    origin = "real activations of a trained text encoder" if path == REAL_HIDDEN else str(path)
    return Hidden(states, origin)


def synthetic_hidden(tokens: int, seed: int) -> Hidden:
    """States that drift among a few topics, with the outlier channels of trained models."""
    random = torch.Generator().manual_seed(seed)
    topics = torch.randn(32, SYNTHETIC_WIDTH, generator=random)
    # A topic lasts 64 tokens and comes back; half of a token is its topic, half its own.
    topic = torch.randint(len(topics), (-(-tokens // 64),), generator=random)
    states = topics[topic].repeat_interleave(64, 0)[:tokens]
    states = states + torch.randn(tokens, SYNTHETIC_WIDTH, generator=random)
    states[:, ::64] = 4 * states[:, ::64] + 4
    return Hidden(states.bfloat16(), "synthetic activations")


def _error(expected: str, got: object) -> ValueError:
    return ValueError(f"flash_csa.demo: {expected}, got {got}")
