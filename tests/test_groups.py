"""How many groups the fused backend chooses."""

from __future__ import annotations

import os

import pytest

from kda_jax.groups import choose_groups


@pytest.mark.parametrize(
    ("threads", "sizes", "want"),
    [
        (2, (1, 1, 16, 100), 1),  # a single walk already occupies half of a small machine
        (64, (1, 12, 128, 1000), 1),  # 96 walks
        (64, (1, 1, 64, 1000), 6),  # 4 walks: groups for a third of the threads
        (64, (1, 1, 64, 16), 2),  # too short for more
        (64, (1, 1, 64, 3), 1),
        (1024, (1, 1, 16, 100000), 16),
        (64, (0, 1, 64, 0), 1),
    ],
)
def test_choice(monkeypatch, threads, sizes, want):
    monkeypatch.setattr(os, "cpu_count", lambda: threads)
    assert choose_groups("cpu", *sizes) == want
    assert choose_groups("cuda", *sizes) == 1
