"""`step_rows`: a step's rows of the state pool, checked on the host before they go in."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kda_jax import Capacity, ChunkMetadata
from kda_jax.serving import CheckpointRule, plan_checkpoints, step_rows

R = 10
METADATA = ChunkMetadata.from_seq_lens(
    [20, 0, 5], checkpoint_offsets=[[4, 16], [], [5]], capacity=Capacity(32, 4, 9, 4)
)


def test_rows_are_padded_to_the_capacity() -> None:
    rows = step_rows(
        METADATA, R, [3, -2, 9], has_initial_state=[1, 1, 0], checkpoint_state_indices=[0, -1, 8]
    )
    assert [x.tolist() for x in rows] == [
        [3, -2, 9, -1],
        [True, True, False, False],
        [0, -1, 8, -1],
    ]
    assert [x.dtype for x in rows] == [np.int32, np.bool_, np.int32]
    everything = step_rows(METADATA, R, [3, 4, 9], checkpoint_state_indices=[0, 1, 2])
    assert everything.has_initial_state.tolist() == [True, True, True, False]


def test_rows_of_a_plan() -> None:
    """From the positions over the rows of the pool to the step, without another list."""
    plan = plan_checkpoints(CheckpointRule(4), [20, 7], [8, 0]).with_rows([5, 6, 2], in_use=[0, 1])
    metadata = plan.metadata(capacity="bucket")
    rows = step_rows(metadata, R, [0, 1], checkpoint_state_indices=plan.destination)
    assert rows.checkpoint_state_indices.tolist()[:3] == [5, 6, 2]
    with pytest.raises(ValueError, match="checkpoint_state_indices holds 5, which is in state_ind"):
        step_rows(metadata, R, [0, 5], checkpoint_state_indices=plan.destination)


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "row past the end": (
        {"state_indices": [3, 10, 9]},
        r"state_indices\[1\] is 10, want a row of the pool, 0..9, or a negative number for none",
    ),
    "checkpoint past the end": (
        {"checkpoint_state_indices": [0, 1, 99]},
        r"checkpoint_state_indices\[2\] is 99, want a row of the pool, 0..9",
    ),
    "two sequences in one row": (
        {"state_indices": [3, 9, 3]},
        "state_indices holds 3 twice; each sequence needs a row of its own",
    ),
    "two checkpoints in one row": (
        {"checkpoint_state_indices": [2, -1, 2]},
        "checkpoint_state_indices holds 2 twice; each checkpoint needs a row of its own",
    ),
    "a checkpoint where a state is read": (
        {"checkpoint_state_indices": [1, 2, 9]},
        "checkpoint_state_indices holds 9, which is in state_indices too: .* take a row that is fr",
    ),
    "a checkpoint where a state is only written": (
        {"checkpoint_state_indices": [3, 2, 1], "has_initial_state": [False, True, True]},
        "checkpoint_state_indices holds 3, which is in state_indices too",
    ),
    "too few rows": (
        {"state_indices": [3, 0]},
        "state_indices has 2 entries, want 3: one for each of the metadata's sequences",
    ),
    "padding in the rows": (
        {"checkpoint_state_indices": [1, 2, 4, -1]},
        "checkpoint_state_indices has 4 entries, want 3",
    ),
    "no integers": ({"state_indices": [0.5, 1, 2]}, "state_indices has dtype float64, want integ"),
    "device arrays": ({"state_indices": jnp.arange(3)}, "state_indices is a JAX array"),
    "flags": ({"has_initial_state": [True]}, "has_initial_state has 1 entries, want 3"),
    "lengths for metadata": ({"metadata": [20, 0, 5]}, "metadata is a list, want a ChunkMetadata"),
    "text for a number": ({"num_rows": "10"}, "num_rows is '10', want an integer: the rows of"),
    "half a row": ({"num_rows": 10.5}, "num_rows is 10.5, want an integer"),
    "texts": ({"has_initial_state": ["False"] * 3}, "has_initial_state has dtype <U5, want bool"),
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_step_rows_refuses(what: str) -> None:
    changed, message = BAD_ROWS[what]
    good: dict[str, Any] = {"state_indices": [3, 0, 9], "checkpoint_state_indices": [1, 2, 4]}
    good |= {"metadata": METADATA, "num_rows": R}
    step_rows(**good)
    with pytest.raises(ValueError, match=message):
        step_rows(**good | changed)


@given(
    st.lists(st.integers(-3, R + 1), min_size=3, max_size=3),
    st.lists(st.integers(-3, R + 1), min_size=3, max_size=3),
)
def test_what_passes_has_one_writer_for_each_row(live: list[int], saved: list[int]) -> None:
    """All that goes through is right, and all that is right goes through."""
    rows = [x for x in live + saved if x >= 0]
    right = len(set(rows)) == len(rows) and all(x < R for x in rows)
    try:
        step_rows(METADATA, R, live, checkpoint_state_indices=saved)
    except ValueError:
        assert not right
    else:
        assert right
