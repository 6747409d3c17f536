"""What is measured of a row: all take and give tensors whose first dim is the query row."""

import torch
from torch import Tensor

from .planted import Evidence


def members(lists: Tensor, size: int) -> Tensor:
    """bool [Q, size]: which positions the lists i64 [Q, K] (-1 none) hold."""
    found = torch.zeros(len(lists), size + 1, dtype=torch.bool, device=lists.device)
    return found.scatter_(1, torch.where(lists < 0, size, lists), True)[:, :size]


def recall(lists: Tensor, wanted: Tensor, size: int) -> Tensor:
    """f32 [Q]: share of the wanted positions i64 [Q, r] that the lists hold; 1 if none."""
    present = wanted >= 0
    held = members(lists, size).gather(1, wanted.clamp(min=0)) & present
    return torch.where(present.any(1), held.sum(1) / present.sum(1).clamp(min=1), 1.0)


def jaccard(a: Tensor, b: Tensor, size: int) -> Tensor:
    """f32 [Q]: intersection over union; 1 for two empty lists."""
    a, b = members(a, size), members(b, size)
    union = (a | b).sum(1)
    return torch.where(union > 0, (a & b).sum(1) / union.clamp(min=1), 1.0)


def covered(mass: Tensor, lists: Tensor) -> Tensor:
    """f32 [Q]: sum of mass f32 [Q, N] over the lists' positions."""
    return torch.where(lists >= 0, mass.gather(1, lists.clamp(min=0)), 0.0).sum(1)


def relative_error(got: Tensor, expected: Tensor) -> Tensor:
    """f32 [Q]: norm of the difference over norm of the expected, whole rows."""
    got, expected = got.flatten(1).float(), expected.flatten(1).float()
    return (got - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)


def boundary_gap(scores: Tensor, n_vis: Tensor, k: int) -> Tensor:
    """f32 [Q]: score of the last selected entry less that of the first left out, in standard
    deviations of the row's visible scores; NaN where nothing is left out."""
    visible = torch.arange(scores.shape[1], device=scores.device) < n_vis[:, None]
    spread = torch.stack([row[seen].std() for row, seen in zip(scores, visible, strict=True)])
    if scores.shape[1] <= k:
        return torch.full_like(spread, torch.nan)
    best = torch.where(visible, scores, -torch.inf).topk(k + 1, dim=1).values
    gap = (best[:, k - 1] - best[:, k]) / spread
    return torch.where(gap.isfinite(), gap, torch.nan)


def answered(out: Tensor, evidence: Evidence) -> Tensor:
    """bool [Q]: the codes that correlate most with a row's output, of all codes planted, are its
    own. out f32 [Q, H, 512], read as the mean of its heads."""
    width = evidence.codes.shape[1]
    read = out.float().mean(1)[:, evidence.first_dim : evidence.first_dim + width]
    alike = read @ torch.nn.functional.normalize(evidence.codes, dim=1).T
    own = members(evidence.answers, len(evidence.codes))
    worst_own = torch.where(own, alike, torch.inf).amin(1)
    best_other = torch.where(own, -torch.inf, alike).amax(1)
    return worst_own > best_other


def found(lists: Tensor, tokens: Tensor, ratio: int, size: int) -> Tensor:
    """bool [Q]: the lists hold the entries of all `tokens` i64 [Q, M], -1 none."""
    return recall(lists, torch.where(tokens >= 0, tokens // ratio, -1), size) == 1
