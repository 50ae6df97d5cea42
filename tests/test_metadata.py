"""`ChunkMetadata`: the tables, padding, capacities, identity, and what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import Capacity, ChunkMetadata

LENGTHS = [3, 0, 130, 64]
OFFSETS = [[1], [], [128, 5, 130], [64]]


def test_tables() -> None:
    m = ChunkMetadata.from_seq_lens(LENGTHS)
    assert m.seqs.tolist() == [[0, 3, 0, 1], [3, 0, 1, 0], [3, 130, 1, 3], [133, 64, 4, 1]]
    assert m.chunks.tolist() == [
        [0, 0, 3, -1],
        [2, 3, 64, -1],
        [2, 67, 64, -1],
        [2, 131, 2, -1],
        [3, 133, 64, -1],
    ]
    assert m.checkpoints.shape == (0, 2)
    assert m.capacity == Capacity(tokens=197, sequences=4, chunks=5, checkpoints=0)
    for table in (m.seqs, m.chunks, m.checkpoints):
        assert table.dtype == np.int32
        with pytest.raises(ValueError):
            table[:] = 0


def test_checkpoints_cut_chunks() -> None:
    m = ChunkMetadata.from_seq_lens(LENGTHS, checkpoint_offsets=OFFSETS)
    assert m.chunks.tolist() == [
        [0, 0, 1, 0],
        [0, 1, 2, -1],
        [2, 3, 5, 2],
        [2, 8, 59, -1],
        [2, 67, 64, 1],
        [2, 131, 2, 3],
        [3, 133, 64, 4],
    ]
    assert m.checkpoints.tolist() == [[0, 1], [2, 128], [2, 5], [2, 130], [3, 64]]
    assert m.checkpoint_offsets == OFFSETS


def test_checkpoint_on_chunk_end_leaves_the_grid() -> None:
    plain = ChunkMetadata.from_seq_lens([300, 65])
    m = ChunkMetadata.from_seq_lens([300, 65], checkpoint_offsets=[[64, 256, 300], [64]])
    np.testing.assert_array_equal(m.seqs, plain.seqs)
    np.testing.assert_array_equal(m.chunks[:, :3], plain.chunks[:, :3])


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("seed", range(4))
def test_chunks_tile_the_tokens(chunk_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 200, 30)
    offsets = [
        rng.choice(n, size=min(n, rng.integers(0, 4)), replace=False) + 1 if n else []
        for n in lengths
    ]
    m = ChunkMetadata.from_seq_lens(
        lengths, chunk_size=chunk_size, checkpoint_offsets=offsets, capacity="bucket"
    )
    rows = m.chunks[: m.num_chunks]
    owner, first, valid, checkpoint = rows.T
    np.testing.assert_array_equal(first, np.cumsum(valid) - valid)
    assert valid.sum() == lengths.sum() and valid.min() >= 1 and valid.max() <= chunk_size
    ends = first + valid - m.cu_seqlens[owner]
    wanted = {
        (s, e)
        for s, n in enumerate(lengths)
        for e in {*range(chunk_size, n, chunk_size), n, *map(int, offsets[s])} - {0}
    }
    assert set(zip(owner.tolist(), ends.tolist(), strict=True)) == wanted
    for row, (sequence, offset) in enumerate(m.checkpoints[: m.num_checkpoints].tolist()):
        i = int(np.flatnonzero(checkpoint == row)[0])
        assert (owner[i], ends[i]) == (sequence, offset)
    assert np.count_nonzero(checkpoint >= 0) == m.num_checkpoints


def test_padding_rows_and_host_properties() -> None:
    m = ChunkMetadata.from_seq_lens(
        LENGTHS, checkpoint_offsets=OFFSETS, capacity=Capacity(300, 6, 9, 7)
    )
    assert m.seqs[4:].tolist() == [[197, -1, 7, 0]] * 2
    assert m.chunks[7:].tolist() == [[-1, 197, 0, -1]] * 2
    assert m.checkpoints[5:].tolist() == [[-1, 0]] * 2
    assert (m.num_sequences, m.num_tokens, m.num_chunks, m.num_checkpoints) == (4, 197, 7, 5)
    assert m.seq_lens.tolist() == LENGTHS
    assert m.cu_seqlens.tolist() == [0, 3, 3, 133, 197]
    assert m.chunk_offsets.tolist() == [0, 2, 2, 6, 7]
    assert m.chunk_indices.tolist() == [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2], [2, 3], [3, 0]]


def test_other_constructors_build_the_same() -> None:
    m = ChunkMetadata.from_seq_lens(LENGTHS, checkpoint_offsets=OFFSETS)
    cu = np.array([0, 3, 3, 133, 197], np.int32)
    assert ChunkMetadata.from_cu_seqlens(cu, checkpoint_offsets=OFFSETS) == m
    indices = np.array([[0, 0], [2, 0], [2, 1], [2, 2], [3, 0]], np.int32)
    offsets = np.array([0, 1, 1, 4, 5], np.int32)
    built = ChunkMetadata.from_chunk_indices(cu, indices, offsets, checkpoint_offsets=OFFSETS)
    assert built == m


def test_flat_checkpoints_are_one_per_sequence() -> None:
    flat = ChunkMetadata.from_seq_lens([100, 50, 70], checkpoint_offsets=[64, 0, 70])
    nested = ChunkMetadata.from_seq_lens([100, 50, 70], checkpoint_offsets=[[64], [], [70]])
    assert flat == nested
    assert ChunkMetadata.from_seq_lens([100, 50, 70], checkpoint_offsets=np.array([64, 0, 70])) == (
        nested
    )


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_nothing_to_do(lengths: list[int]) -> None:
    m = ChunkMetadata.from_seq_lens(lengths)
    assert m.capacity == Capacity(0, len(lengths), 0, 0)
    assert m.seq_lens.tolist() == lengths and m.num_chunks == 0


def test_buckets_hold_any_mix_and_are_few() -> None:
    assert Capacity.bucket(1, 1) == Capacity(64, 1, 2, 0)
    assert Capacity.bucket(65, 3, 5) == Capacity(96, 4, 13, 8)
    assert Capacity.bucket(97, 3).tokens == 128
    assert Capacity.bucket(np.int64(97), np.int32(3)) == Capacity.bucket(97, 3)
    with pytest.raises(TypeError, match=r"tokens is 64\.5, want an integer"):
        Capacity.bucket(64.5, 1)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(50):
        cuts = np.sort(rng.integers(0, 1900, 6))
        lengths = np.diff(np.concatenate([[0], cuts, [1900]]))
        offsets = [int(n) for n in lengths]
        seen.add(
            ChunkMetadata.from_seq_lens(
                lengths, checkpoint_offsets=offsets, capacity="bucket"
            ).capacity
        )
    assert len(seen) <= 2, seen
    # The worst mix: every sequence one row past a chunk, and cut once more.
    ChunkMetadata.from_seq_lens([65] * 8, checkpoint_offsets=[[1]] * 8, capacity="bucket")


def test_identity_is_by_content() -> None:
    a = ChunkMetadata.from_seq_lens(LENGTHS, checkpoint_offsets=OFFSETS)
    b = ChunkMetadata.from_seq_lens(np.array(LENGTHS), checkpoint_offsets=OFFSETS)
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1
    assert a != ChunkMetadata.from_seq_lens(LENGTHS)
    assert a != ChunkMetadata.from_seq_lens(LENGTHS, checkpoint_offsets=OFFSETS, chunk_size=32)
    assert a != "metadata"


def test_is_a_pytree_of_three_arrays() -> None:
    m = ChunkMetadata.from_seq_lens(LENGTHS)
    leaves, tree = jax.tree.flatten(m)
    assert len(leaves) == 3
    assert jax.tree.unflatten(tree, leaves) == m
    other = ChunkMetadata.from_seq_lens([130, 64, 3, 0])
    assert jax.tree.structure(other) == tree  # the lengths are not in the static part
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(m)]
    assert paths == [".seqs", ".chunks", ".checkpoints"]
    on_device = jax.device_put(m)
    assert not on_device.on_host
    with pytest.raises(TypeError, match="no hash"):
        hash(on_device)
    with pytest.raises(ValueError, match="built on the host"):
        _ = on_device.num_chunks


def test_padding_helpers() -> None:
    m = ChunkMetadata.from_seq_lens([70, 5], capacity=Capacity(80, 4, 4, 0))
    x = np.ones((1, 75, 2))
    assert isinstance(m.pad_tokens(x), np.ndarray)
    assert m.pad_tokens(x).shape == (1, 80, 2) and m.pad_tokens(x)[:, 75:].sum() == 0
    assert m.pad_tokens(jnp.ones(75), axis=0).shape == (80,)
    assert m.pad_states(np.ones((2, 3))).tolist() == [[1] * 3] * 2 + [[0] * 3] * 2
    with pytest.raises(ValueError, match="longer than the capacity of 80 tokens"):
        m.pad_tokens(np.ones((1, 81)))


def test_padding_helpers_count() -> None:
    """One token or state too few or too many is somebody's, or nobody's: a wrong result."""
    m = ChunkMetadata.from_seq_lens([70, 5], capacity=Capacity(80, 4, 4, 0))
    padded = m.pad_tokens(np.ones((1, 75)))
    assert m.pad_tokens(padded).shape == padded.shape == (1, 80)
    for missing in (74, 76):
        with pytest.raises(ValueError, match=f"has {missing} tokens, want 75: what the"):
            m.pad_tokens(np.ones((1, missing)))
    with pytest.raises(ValueError, match="has 1 sequences, want 2: what the metadata's"):
        m.pad_states(np.ones((1, 3)))
    with pytest.raises(ValueError, match=r"axis is 1, x has shape \(75,\): pass the axis"):
        m.pad_tokens(jnp.ones(75))
    with pytest.raises(TypeError, match="x is a list, want a NumPy or JAX array"):
        m.pad_tokens([1.0] * 75)
    traced = jax.jit(lambda m, x: m.pad_tokens(x, 0))  # the lengths cannot be read there
    assert traced(m, np.ones(74)).shape == (80,)


REFUSED_CU = [
    (np.array([1, 5]), "starts at 1, want 0"),
    (np.array([], np.int32), "starts at nothing"),
    (np.array([0, 5, 3]), "decreases at entry 2: 5 then 3"),
    (np.array([0.0, 5.0]), "dtype float64"),
    (np.array([0, 5], np.uint32), "dtype uint32"),
    (np.array([[0, 5]]), "shape"),
    (np.array([0, 2**31]), "fit in int32"),
    (jnp.array([0, 5]), "build it on the host from a NumPy array"),
]


@pytest.mark.parametrize(("cu", "message"), REFUSED_CU)
def test_refuses_cu_seqlens(cu: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChunkMetadata.from_cu_seqlens(cu)


def test_refuses_traced_lengths() -> None:
    with pytest.raises(ValueError, match="build it on the host"):
        jax.jit(ChunkMetadata.from_cu_seqlens)(np.array([0, 5]))
    with pytest.raises(ValueError, match="seq_lens"):
        jax.jit(lambda n: ChunkMetadata.from_seq_lens([n]))(5)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([5, -1], r"seq_lens\[1\] is -1"),
        ([5.0], "dtype float64"),
        ([True], "dtype bool"),
        ([[5]], "shape"),
        (["5"], "dtype"),
        ([2**31 - 1, 1], "fit in int32"),
        (np.array([2**62] * 4), r"seq_lens\[0\] is 4611686018427387904, at most 2147483647 fit"),
        (np.array([1, 2**64 - 1], np.uint64), r"seq_lens\[1\] is 18446744073709551615"),
    ],
)
def test_refuses_seq_lens(lengths: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChunkMetadata.from_seq_lens(lengths)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([[512], []], r"512 on sequence 0: want 1\.\.500"),
        ([[0], []], r"0 on sequence 0: want 1\.\.500"),
        ([[-1], []], r"-1 on sequence 0: want 1\.\.500"),
        ([-1, 0], r"-1 on sequence 0"),
        ([[], [1]], "1 on sequence 1: the sequence is empty"),
        ([[64, 3, 64], []], "64 is given twice on sequence 0"),
        ([64], r"1 entries for 2 sequences.*\[\[64, 128\], \[\]\]"),
        ([[64]], "1 entries for 2 sequences"),
        ([], "0 entries for 2 sequences"),
        ([64, []], "mixes numbers and lists"),
        ([[1.5], []], "dtype float64"),
        (jnp.array([64, 0]), "build it on the host"),
    ],
)
def test_refuses_checkpoints(offsets: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)checkpoint_offsets.*{message}"):
        ChunkMetadata.from_seq_lens([500, 0], checkpoint_offsets=offsets)


@pytest.mark.parametrize(
    ("indices", "offsets", "message"),
    [
        ([[0, 0], [1, 0]], [0, 1, 2], r"chunk_offsets\[1\] is 1, want 2"),
        ([[0, 0], [0, 2], [1, 0]], [0, 2, 3], r"chunk_indices\[1\] is \[0, 2\], want \[0, 1\]"),
        ([[0, 0], [0, 1]], [0, 2, 3], r"chunk_indices has shape \(2, 2\), want \(3, 2\)"),
    ],
)
def test_refuses_a_wrong_grid(indices: object, offsets: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChunkMetadata.from_chunk_indices([0, 65, 70], np.array(indices), np.array(offsets))


def test_refuses_capacity_and_chunk_size() -> None:
    with pytest.raises(ValueError, match=r"capacity\.chunks is 1, 2 too few: this batch has 3"):
        ChunkMetadata.from_seq_lens([65, 1], capacity=Capacity(66, 2, 1))
    with pytest.raises(ValueError, match="capacity is 'large'"):
        ChunkMetadata.from_seq_lens([65], capacity="large")  # type: ignore[arg-type]
    for size in (48, 128, 0):
        with pytest.raises(ValueError, match="chunk_size"):
            ChunkMetadata.from_seq_lens([65], chunk_size=size)
        with pytest.raises(ValueError, match="chunk_size"):
            Capacity.bucket(65, 1, chunk_size=size)
