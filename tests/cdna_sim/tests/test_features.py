"""Compiled HIP kernels, one per group of instructions, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from .. import Stats, run
from .numbers import LANE, F, from_bf16, rng, to_bf16
from .toolchain import compile_hip, each_arch


def feature(name: str, arch: str, args: list, grid: int = 1, **options) -> Stats:
    code = compile_hip("features", arch)
    return run(code, name, grid, 64, args, **options)


@each_arch
def test_math(arch: str) -> None:
    r = rng()
    a = (r.standard_normal(64) * 5).astype(F)
    b = (r.standard_normal(64) * 5).astype(F)
    out = np.full((30, 64), np.nan, F)
    feature("math", arch, [a, b, out])
    x, y = a.astype(float), b.astype(float)
    p = (np.abs(a) + F(0.01)).astype(float)
    expected = [
        np.exp(x),
        np.exp2(x),
        np.log(p),
        np.log2(p),
        1 / np.sqrt(p),
        np.sqrt(p),
    ]
    expected += [1 / x, x / y, np.exp2(x), np.log2(p), 1 / np.sqrt(p), 1 / x]
    expected += [1 / (1 + np.exp(-x)), np.log1p(np.exp(x)), x * y + p, np.maximum(x, y)]
    expected += [np.minimum(x, y), np.floor(x), np.ceil(x), np.trunc(x), np.rint(x)]
    expected += [
        np.abs(x) - y,
        np.copysign(x, y),
        8 * x,
        np.clip(x, -1, 1),
        x - np.floor(x),
    ]
    expected += [
        np.clip(x, 0, 1),
        2 * (x + y),
        np.maximum(np.maximum(x, y), p),
        np.log10(p),
    ]
    np.testing.assert_allclose(out, np.stack(expected), rtol=3e-6, atol=3e-7)


def _c_divide(x: int, y: int) -> tuple[int, int]:
    quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
    return quotient, x - quotient * y


def integer_reference(x: int, y: int, lane: int) -> list[int]:
    ux, uy, s = x & 0xFFFFFFFF, y & 0xFFFFFFFF, y & 31
    text = f"{ux:032b}"
    swapped = int.from_bytes(ux.to_bytes(4, "little"), "big")
    shifted = x << 7 & 0xFFFFFFFF
    half = (x >> 1) & 0xFFFFFFFF
    values = [x + y, x - y, x * y, x * y >> 32, ux * uy >> 32, x << s, x >> s, ux >> s]
    values += [x & y, x | y, x ^ y, ~x, x & y | lane, min(x, y), max(x, y)]
    values += [min(ux, uy), max(ux, uy), x >> 5 & 0x1FF]
    values += [(shifted - (shifted >> 31 << 32)) >> 20, text.count("1")]
    values += [f"{ux | 1:032b}".find("1"), f"{ux | 1 << 31:032b}"[::-1].find("1")]
    values += [int(text[::-1], 2), swapped, *_c_divide(x, y | 1), ux // (uy | 1)]
    values += [(x & 0xFF) * (y & 0xFFFF) + lane, (ux << 3) + uy, (ux + uy) << 2]
    values += [ux << 4 | uy, ux + uy + lane, x ^ y ^ lane]
    values += [ux >> 16 << 16 | uy >> 16, (ux << 32 | uy) >> 16, ux < uy, x == y]
    values += [max(uy - ux, 0), x & ~y, abs(half - (half >> 31 << 32))]
    return [int(v) & 0xFFFFFFFF for v in values]


@each_arch
def test_integers(arch: str) -> None:
    a, b = rng().integers(-(2**31), 2**31, (2, 64)).astype(np.int32)
    a[:8] = [0, 1, -1, 7, 100, -100, 2**31 - 1, -(2**31) + 1]
    b[:4], b[40:] = [0, 1, -1, 7], rng().integers(-50, 50, 24)
    out = np.zeros((40, 64), np.uint32)
    feature("integers", arch, [a, b, out])
    expected = [integer_reference(int(a[k]), int(b[k]), k) for k in range(64)]
    np.testing.assert_array_equal(out, np.array(expected).T)


@each_arch
def test_wide_integers(arch: str) -> None:
    a, b = rng().integers(-(2**63), 2**63 - 1, (2, 64))
    b[::3] = rng().integers(0, 100, 22)
    out = np.zeros((16, 64), np.uint64)
    feature("wide", arch, [a, b, out])
    mask = 2**64 - 1
    for k in range(64):
        x, y = int(a[k]), int(b[k])
        ux, uy, s = x & mask, y & mask, y & 63
        expected = [x + y, x - y, x * y, x << s, x >> s, ux >> s, x & y, x ^ y, x < y]
        expected += [
            ux < uy,
            x == y,
            (x & 0xFFFFFFFF) * (y & 0xFFFFFFFF) + uy,
            x + 3 * y,
        ]
        expected += [min(x, y), -x, ux.bit_count()]
        assert out[:, k].tolist() == [int(v) & mask for v in expected], k


@each_arch
def test_conversions(arch: str) -> None:
    a = (rng().standard_normal(64) * 5).astype(F)
    c = rng().integers(-128, 128, 64).astype(np.int8)
    bf, half = np.zeros(128, np.uint16), np.zeros(128, np.float16)
    out, integers = np.zeros((7, 64), F), np.zeros((4, 64), np.int32)
    feature("conversions", arch, [a, bf, half, out, integers, c])
    pairs = np.stack([a, a[LANE ^ 1]], 1)
    h = pairs.astype(np.float16)
    np.testing.assert_array_equal(bf.reshape(64, 2), to_bf16(pairs))
    np.testing.assert_allclose(half.reshape(64, 2), h * h.astype(F) + h, rtol=2e-3, atol=2e-3)
    expected = [h[:, 0], from_bf16(to_bf16(a)) * 2, c, c.view(np.uint8), bf[::2]]
    expected += [h[:, 0] * F(3) + h[:, 1], h[:, 0] * a + h[:, 1]]
    np.testing.assert_allclose(out, np.stack(expected), rtol=2e-3, atol=4e-3)
    np.testing.assert_array_equal(out[:5], np.stack(expected[:5]))
    truncated = np.trunc(a).astype(np.int32)
    wanted = [truncated, np.abs(truncated), (truncated * 300).astype(np.int16), LANE]
    np.testing.assert_array_equal(integers, np.stack(wanted))


@each_arch
def test_packed_floats(arch: str) -> None:
    x, y = rng().standard_normal((2, 64, 2)).astype(F)
    out = np.zeros((8, 64, 2), F)
    feature("packed", arch, [x, y, out])
    z, w = y[:, [1, 1]], np.stack([y[:, 1], x[:, 0]], 1)
    expected = [x * y + x, x * y, x + y, x * z, x - y, w * x + z, -x * y, x * F(3)]
    np.testing.assert_allclose(out, np.stack(expected), rtol=1e-6, atol=1e-6)


@each_arch
@pytest.mark.parametrize("n", [0, 13, 64])
def test_sub_dword(arch: str, n: int) -> None:
    a = rng().integers(0, 2**16, 256).astype(np.uint16)
    c = rng().integers(0, 256, 256).astype(np.uint8)
    out, narrow = np.zeros(384, np.uint16), np.full(192, 7, np.uint8)
    feature("sub_dword", arch, [a, c, out, narrow, n])
    gathered = np.stack([a[LANE * s + o & 255] for s, o in ((3, 0), (5, 7), (7, 0), (11, 0))], 1)
    np.testing.assert_array_equal(out[:256].reshape(64, 4), gathered)
    np.testing.assert_array_equal(out[256:320], a[:64] * a[64:128] + a[128:192])
    np.testing.assert_array_equal(out[320:].view(np.int16), a[:64].view(np.int16) >> 3)
    np.testing.assert_array_equal(narrow[:64], c[255 - LANE])
    signed = np.minimum(c[:64].view(np.int8), c[64:128].view(np.int8))
    np.testing.assert_array_equal(narrow[64:128].view(np.int8), signed)
    np.testing.assert_array_equal(narrow[128:], np.where(n > LANE, a[:64] >> 8, 7))


def _dpp_row(x, old, source, valid):
    return np.where(valid, x[np.clip(source, 0, 63)], old)


@each_arch
def test_lanes(arch: str) -> None:
    x = rng().integers(0, 1000, 64).astype(np.int32)
    out, ballots = np.zeros((13, 64), np.int32), np.zeros(128, np.uint64)
    floats = np.zeros((2, 64), F)
    feature("lanes", arch, [x, out, ballots, floats])
    row, position = LANE & ~15, LANE & 15
    vote = sum(1 << k for k in range(64) if x[k] & 1)
    pushed = np.zeros(64, np.int32)
    pushed[LANE * 3 & 63] = x
    below = np.cumsum(x & 1) - (x & 1)
    expected = [x[LANE ^ 5], pushed, x[LANE ^ 1], x[LANE ^ 1]]
    expected += [np.full(64, x[17] + x[0]), x[LANE + 1 & 63], below]
    expected += [x[row | position - 8 & 15], _dpp_row(x, 0, LANE - 1, position > 0)]
    in_bank = (LANE >> 2 & 3) > 0
    expected += [_dpp_row(x, -1, LANE + 3, (position < 13) & in_bank)]
    expected += [x[LANE & ~3 | LANE + 2 & 3], x[row | 15 - position]]
    expected += [np.where(LANE // 16 % 2 == 0, x[row | 3], -1)]
    np.testing.assert_array_equal(out, np.stack(expected))
    odd = np.flatnonzero(x & 1)
    assert (ballots[:64] == vote).all()
    np.testing.assert_array_equal(ballots[64 : 64 + odd.size], odd)
    np.testing.assert_array_equal(floats[0], x.sum())
    np.testing.assert_array_equal(floats[1], np.where(LANE & 1, (x & 7) * LANE, -(x & 7)))


@each_arch
def test_atomics(arch: str) -> None:
    a = rng().random(64).astype(F)
    sums, counts = np.zeros(8, F), np.zeros(128, np.int32)
    feature("atomics", arch, [a, sums, counts])
    np.testing.assert_allclose(sums, a.reshape(8, 8).sum(0), rtol=1e-6)
    bits = np.bitwise_or.reduce(np.where(a > 0.5, 1 << (LANE & 3), 0))
    assert counts[:3].tolist() == [63, 64, bits]
    np.testing.assert_array_equal(np.sort(counts[64:]), LANE)


@each_arch
def test_buffers(arch: str) -> None:
    a = rng().integers(1, 2**30, 64).astype(np.int32)
    out, half = np.full(320, -1, np.int32), np.full(64, -1, np.int16)
    feature("buffers", arch, [a, out, half])
    inside = np.where(LANE < 50, a, 0)
    np.testing.assert_array_equal(out[:64], inside)
    np.testing.assert_array_equal(out[64:].reshape(64, 4), inside.reshape(16, 4)[LANE & 15])
    np.testing.assert_array_equal(half, np.where(LANE < 50, LANE, -1))


@each_arch
def test_direct_to_lds(arch: str) -> None:
    a, out = rng().integers(0, 2**30, 64).astype(np.int32), np.zeros(64, np.int32)
    feature("direct", arch, [a, out])
    np.testing.assert_array_equal(out, a[::-1])


@each_arch
def test_flat_pointers(arch: str) -> None:
    a, out = rng().integers(0, 1000, 64).astype(np.int32), np.zeros(64, np.int32)
    feature("flat_pointers", arch, [a, out])
    p, i = np.where(a & 1, a[:, None], a[:, None] + 1), LANE & 31
    np.testing.assert_array_equal(out, np.where(i > 3, p[i, LANE] * 2, p[i + 1, LANE] + i))


@each_arch
def test_tables_in_the_code_object(arch: str) -> None:
    primes = np.array([2, 3, 5, 7, 11, 13, 17, 19])
    for n, table in enumerate((primes, np.arange(8) ** 2)):
        out = np.zeros(64, np.int32)
        feature("tables", arch, [out, n])
        np.testing.assert_array_equal(out, primes[LANE * 3 & 7] + 100 * table[LANE & 7])


@each_arch
def test_hidden_arguments(arch: str) -> None:
    out = np.zeros((3, 64), np.int32)
    feature("hidden", arch, [out], grid=3)
    np.testing.assert_array_equal(out, np.tile(64 + 1000 * 192 + LANE, (3, 1)))


@each_arch
def test_dynamic_lds(arch: str) -> None:
    a, out = rng().integers(0, 1000, 64).astype(np.int32), np.zeros(64, np.int32)
    feature("dynamic", arch, [a, out], dynamic_lds=48 * 1024)
    np.testing.assert_array_equal(out, a[::-1])


def test_transpose_read() -> None:
    a, out = np.arange(256).astype(np.uint16), np.zeros((4, 16, 4), np.uint16)
    feature("transpose_read", "gfx950", [a, out])
    np.testing.assert_array_equal(out, a.reshape(4, 4, 16).transpose(0, 2, 1))


def test_lane_swaps() -> None:
    a = rng().integers(0, 2**32, 128).astype(np.uint32)
    out = np.zeros((4, 64), np.uint32)
    feature("swaps", "gfx950", [a, out])
    x, y = a[:64], a[64:]
    expected = [np.r_[x[:32], y[:32]], np.r_[x[32:], y[32:]]]
    rows_x, rows_y = x.reshape(4, 16), y.reshape(4, 16)
    expected += [np.r_[rows_x[0], rows_y[0], rows_x[2], rows_y[2]]]
    expected += [np.r_[rows_x[1], rows_y[1], rows_x[3], rows_y[3]]]
    np.testing.assert_array_equal(out, np.stack(expected))


def test_direct_to_lds_16_bytes() -> None:
    a = rng().integers(0, 2**30, (64, 4)).astype(np.int32)
    out = np.zeros((64, 4), np.int32)
    feature("direct16", "gfx950", [a, out])
    np.testing.assert_array_equal(out, a[::-1])
