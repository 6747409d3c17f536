"""core/causal.h against definitions spelled out position by position."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_module import core

RATIOS = (1, 2, 4, 128)


def allowed(position: int, ratio: int, strict: bool) -> int:
    """How many groups lie wholly at or before the query (strict: before it)."""
    last = position - 1 if strict else position
    return sum((g + 1) * ratio - 1 <= last for g in range(position // ratio + 2))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("ratio", RATIOS)
def test_visible_entries(ratio: int, strict: bool) -> None:
    positions = np.arange(-1, 5 * ratio + 3, dtype=np.int32)
    expected = [allowed(int(p), ratio, strict) for p in positions]
    assert core().n_vis(positions, ratio, strict).tolist() == expected


@pytest.mark.parametrize("ratio", RATIOS)
def test_groups(ratio: int) -> None:
    """Every group closes once, at its last token."""
    positions = np.arange(6 * ratio, dtype=np.int32)
    closed = positions[core().closes(positions, ratio)]
    assert closed.tolist() == [(g + 1) * ratio - 1 for g in range(6)]
    entries = core().entry_of(positions, ratio)
    assert entries.tolist() == [g for g in range(6) for _ in range(ratio)]


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_closing_token_sees_its_entry(ratio: int) -> None:
    closing = np.arange(ratio - 1, 8 * ratio, ratio, dtype=np.int32)
    entries = core().entry_of(closing, ratio)
    assert (core().n_vis(closing, ratio, False) == entries + 1).all()
    assert (core().n_vis(closing, ratio, True) == entries).all()


def test_padded_row() -> None:
    for ratio in RATIOS:
        assert core().n_vis(-1, ratio, False) == core().n_vis(-1, ratio, True) == 0
        assert not core().closes(-1, ratio)
    assert core().window_length(-1, 128, 0) == 0


def test_last_positions() -> None:
    """1,048,576 tokens, the largest published context."""
    last = 1048575
    assert [core().n_vis(last, r, False) for r in RATIOS] == [1048576, 524288, 262144, 8192]
    assert all(core().closes(last, r) for r in RATIOS)


@given(
    position=st.integers(-1, 400), window=st.sampled_from([1, 16, 128]), first=st.integers(0, 400)
)
@settings(max_examples=300, deadline=None)
def test_window(position: int, window: int, first: int) -> None:
    live = [p for p in range(first, position + 1) if position - window < p]
    assert core().window_length(position, window, first) == len(live)
    if live:
        assert core().window_first(position, window, first) == live[0]
