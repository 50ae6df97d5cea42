"""Vector ALU: integers, bit operations and moves between lanes against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from .asm import Case, check, one, program, three, two
from .toolchain import ARCHITECTURES

U = np.uint32
GFX950 = ("gfx950",)


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(object)  # exact Python integers


def as_u32(x) -> np.ndarray:
    return np.array([int(v) & 0xFFFFFFFF for v in x], np.uint32)


def as_u64(x) -> np.ndarray:
    return np.array([int(v) & (2**64 - 1) for v in x], np.uint64)


def i24(x) -> np.ndarray:
    low = np.asarray(x).astype(np.int64) & 0xFFFFFF
    return wide(np.where(low >> 23, low - (1 << 24), low))


def bits(x, fn) -> list[int]:
    return [fn(f"{int(v) & 0xFFFFFFFF:032b}") for v in x]


INTEGERS = {
    "add_u32": two("v_add_u32_e32", "u32", np.add),
    "sub_u32": two("v_sub_u32_e32", "u32", np.subtract),
    "subrev_u32": two("v_subrev_u32_e32", "u32", lambda a, b: b - a),
    "sub_u32_clamp": Case(
        "v_sub_u32_e64 {d}, {a}, {b} clamp",
        "u32 u32 -> u32",
        lambda a, b: np.where(a > b, a - b, 0),
    ),
    "mul_lo_u32": two("v_mul_lo_u32", "u32", np.multiply),
    "mul_hi_u32": two("v_mul_hi_u32", "u32", lambda a, b: as_u32(wide(a) * wide(b) >> 32)),
    "mul_hi_i32": Case(
        "v_mul_hi_i32 {d}, {a}, {b}",
        "i32 i32 -> u32",
        lambda a, b: as_u32(wide(a) * wide(b) >> 32),
    ),
    "mul_u32_u24": two(
        "v_mul_u32_u24_e32",
        "u32",
        lambda a, b: as_u32(wide(a & 0xFFFFFF) * (b & 0xFFFFFF)),
    ),
    "mul_i32_i24": two("v_mul_i32_i24_e32", "u32", lambda a, b: as_u32(i24(a) * i24(b))),
    "mul_hi_i32_i24": two(
        "v_mul_hi_i32_i24_e32", "u32", lambda a, b: as_u32(i24(a) * i24(b) >> 32)
    ),
    "mad_u32_u24": three(
        "v_mad_u32_u24",
        "u32",
        lambda a, b, c: as_u32(wide(a & 0xFFFFFF) * (b & 0xFFFFFF) + wide(c)),
    ),
    "mad_i32_i24": three("v_mad_i32_i24", "u32", lambda a, b, c: as_u32(i24(a) * i24(b) + wide(c))),
    "min_i32": two("v_min_i32_e32", "i32", np.minimum),
    "max_u32": two("v_max_u32_e32", "u32", np.maximum),
    "max3_i32": three("v_max3_i32", "i32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "med3_u32": three("v_med3_u32", "u32", lambda *x: np.sort(np.stack(x), 0)[1]),
    "and_b32": two("v_and_b32_e32", "u32", np.bitwise_and),
    "or_b32": two("v_or_b32_e32", "u32", np.bitwise_or),
    "xor_b32": two("v_xor_b32_e32", "u32", np.bitwise_xor),
    "xnor_b32": two("v_xnor_b32_e32", "u32", lambda a, b: ~(a ^ b)),
    "not_b32": one("v_not_b32_e32", "u32 -> u32", np.invert),
    "lshlrev_b32": two("v_lshlrev_b32_e32", "u32", lambda a, b: b << (a & U(31))),
    "lshrrev_b32": two("v_lshrrev_b32_e32", "u32", lambda a, b: b >> (a & U(31))),
    "ashrrev_i32": two("v_ashrrev_i32_e32", "i32", lambda a, b: b >> (a & 31)),
    "lshl_add_u32": three("v_lshl_add_u32", "u32", lambda a, b, c: (a << (b & U(31))) + c),
    "add_lshl_u32": three("v_add_lshl_u32", "u32", lambda a, b, c: (a + b) << (c & U(31))),
    "lshl_or_b32": three("v_lshl_or_b32", "u32", lambda a, b, c: a << (b & U(31)) | c),
    "and_or_b32": three("v_and_or_b32", "u32", lambda a, b, c: a & b | c),
    "or3_b32": three("v_or3_b32", "u32", lambda a, b, c: a | b | c),
    "xad_u32": three("v_xad_u32", "u32", lambda a, b, c: (a ^ b) + c),
    "add3_u32": three("v_add3_u32", "u32", lambda a, b, c: a + b + c),
    "bfi_b32": three("v_bfi_b32", "u32", lambda a, b, c: a & b | ~a & c),
    "bfe_u32": three(
        "v_bfe_u32",
        "u32",
        lambda a, b, c: a >> (b & U(31)) & ((U(1) << (c & U(31))) - U(1)),
    ),
    "bfe_i32": Case(
        "v_bfe_i32 {d}, {a}, 3, 7",
        "i32 -> i32",
        lambda a: (a << 22) >> 25,
    ),
    "bfm_b32": two(
        "v_bfm_b32",
        "u32",
        lambda a, b: as_u32(
            [((1 << (int(x) & 31)) - 1) << (int(y) & 31) for x, y in zip(a, b, strict=True)]
        ),
    ),
    "bfrev_b32": one("v_bfrev_b32_e32", "u32 -> u32", lambda a: bits(a, lambda s: int(s[::-1], 2))),
    "ffbh_u32": one("v_ffbh_u32_e32", "u32 -> i32", lambda a: bits(a, lambda s: s.find("1"))),
    "ffbl_b32": one("v_ffbl_b32_e32", "u32 -> i32", lambda a: bits(a, lambda s: s[::-1].find("1"))),
    "ffbh_i32": one(
        "v_ffbh_i32_e32",
        "u32 -> i32",
        lambda a: bits(a, lambda s: s.find("0" if s[0] == "1" else "1")),
    ),
    "bcnt": two(
        "v_bcnt_u32_b32",
        "u32",
        lambda a, b: np.array(bits(a, lambda s: s.count("1")), U) + b,
    ),
    "perm_b32": Case(
        "s_mov_b32 s40, 0x0c0b0703\nv_perm_b32 {d}, {a}, {b}, s40",
        "u32 u32 -> u32",
        lambda a, b: (a >> U(24)) << U(8) | b >> U(24) | np.where(a >> U(31), U(0xFF0000), U(0)),
    ),
    "alignbit": Case(
        "v_alignbit_b32 {d}, {a}, {b}, 11",
        "u32 u32 -> u32",
        lambda a, b: a << U(21) | b >> U(11),
    ),
    "alignbyte": Case(
        "v_alignbyte_b32 {d}, {a}, {b}, 3",
        "u32 u32 -> u32",
        lambda a, b: a << U(8) | b >> U(24),
    ),
    "sad_u32": three("v_sad_u32", "u32", lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c),
    "add_u16": two("v_add_u16_e32", "u16", np.add),
    "mul_lo_u16": two("v_mul_lo_u16_e32", "u16", np.multiply),
    "mad_u16": three("v_mad_legacy_u16", "u16", lambda a, b, c: a * b + c),
    "ashrrev_i16": two("v_ashrrev_i16_e32", "i16", lambda a, b: b >> (a & 15)),
    "lshlrev_b64": Case(
        "v_lshlrev_b64 {d}, {a}, {b}", "u32 u64 -> u64", lambda a, b: b << (a & U(63))
    ),
    "lshrrev_b64": Case(
        "v_lshrrev_b64 {d}, {a}, {b}", "u32 u64 -> u64", lambda a, b: b >> (a & U(63))
    ),
    "ashrrev_i64": Case(
        "v_ashrrev_i64 {d}, {a}, {b}", "u32 i64 -> i64", lambda a, b: b >> (a & U(63))
    ),
    "lshl_add_u64": Case(
        "v_lshl_add_u64 {d}, {a}, 3, {b}", "u64 u64 -> u64", lambda a, b: (a << 3) + b
    ),
    "mov_b64": Case("v_mov_b64_e32 {d}, {a}", "u64 -> u64", lambda a: a),
    "mad_u64_u32": Case(
        "v_mad_u64_u32 {d}, {e}, {a}, {b}, {c}",
        "u32 u32 u64 -> u64 mask",
        lambda a, b, c: (
            as_u64(wide(a) * wide(b) + wide(c)),
            wide(a) * wide(b) + wide(c) >= 2**64,
        ),
    ),
    "add_co_chain": Case(
        "v_add_co_u32_e32 v32, vcc, v8, v10\nv_addc_co_u32_e32 v33, vcc, v9, v11, vcc",
        "u64 u64 -> u64",
        lambda a, b: a + b,
    ),
    "sub_co_chain": Case(
        "v_sub_co_u32_e64 v32, s[40:41], v8, v10\n"
        "v_subb_co_u32_e64 v33, s[40:41], v9, v11, s[40:41]",
        "u64 u64 -> u64",
        lambda a, b: a - b,
    ),
    "add_co_carry": Case(
        "v_add_co_u32_e64 {d}, {e}, {a}, {b}",
        "u32 u32 -> u32 mask",
        lambda a, b: (a + b, wide(a) + wide(b) >= 2**32),
    ),
    "cndmask": Case(
        "s_mov_b64 vcc, {c}\nv_cndmask_b32_e32 {d}, {a}, {b}, vcc",
        "u32 u32 s64 -> u32",
        lambda a, b, m: np.where([int(m) >> k & 1 for k in range(64)], b, a),
    ),
    "partial_exec": Case(
        "v_mov_b32 {d}, {a}\ns_mov_b64 exec, {c}\nv_add_u32 {d}, {a}, {b}",
        "u32 u32 s64 -> u32",
        lambda a, b, m: np.where([int(m) >> k & 1 for k in range(64)], a + b, a),
    ),
    "bitop3_b32": Case(
        "v_bitop3_b32 {d}, {a}, {b}, {c} bitop3:0x96",
        "u32 u32 u32 -> u32",
        lambda a, b, c: a ^ b ^ c,
        archs=GFX950,
    ),
    "bitop3_and_or": Case(
        "v_bitop3_b32 {d}, {a}, {b}, {c} bitop3:0xea",
        "u32 u32 u32 -> u32",
        lambda a, b, c: a & b | c,
        archs=GFX950,
    ),
}
LANES = {
    "readlane": Case("v_readlane_b32 {d}, {a}, 37", "u32 -> s32", lambda a: a[37]),
    "readlane_m0": Case(
        "v_readlane_b32 {d}, {a}, {b}", "u32 s32 -> s32", lambda a, b: a[int(b) & 63]
    ),
    "readfirstlane": Case(
        "s_mov_b64 exec, 0xf00\nv_readfirstlane_b32 {d}, {a}",
        "u32 -> s32",
        lambda a: a[8],
    ),
    "writelane": Case(
        "v_mov_b32 {d}, {a}\nv_writelane_b32 {d}, {b}, 5",
        "u32 s32 -> u32",
        lambda a, b: np.where(np.arange(64) == 5, b, a),
    ),
    "mbcnt": Case(
        "v_mbcnt_lo_u32_b32 {d}, s18, {a}\nv_mbcnt_hi_u32_b32 {d}, s19, {d}",
        "u32 s64 -> u32",
        lambda a, m: a + np.array([(int(m) & ((1 << k) - 1)).bit_count() for k in range(64)]),
    ),
    "swap": Case(
        "v_mov_b32 {d}, {a}\nv_mov_b32 {e}, {b}\nv_swap_b32 {d}, {e}",
        "u32 u32 -> u32 u32",
        lambda a, b: (b, a),
    ),
    "acc_registers": Case(
        "v_accvgpr_write_b32 a3, {a}\ns_nop 4\nv_accvgpr_mov_b32 a5, a3\ns_nop 4\n"
        "v_accvgpr_read_b32 {d}, a5",
        "u32 -> u32",
        lambda a: a,
    ),
    "permlane32_swap": Case(
        "v_mov_b32 {d}, {a}\nv_mov_b32 {e}, {b}\ns_nop 4\nv_permlane32_swap_b32 {d}, {e}",
        "u32 u32 -> u32 u32",
        lambda a, b: (np.r_[a[:32], b[:32]], np.r_[a[32:], b[32:]]),
        archs=GFX950,
    ),
    "permlane16_swap": Case(
        "v_mov_b32 {d}, {a}\nv_mov_b32 {e}, {b}\ns_nop 4\nv_permlane16_swap_b32 {d}, {e}",
        "u32 u32 -> u32 u32",
        lambda a, b: (
            np.r_[a[:16], b[:16], a[32:48], b[32:48]],
            np.r_[a[16:32], b[16:32], a[48:], b[48:]],
        ),
        archs=GFX950,
    ),
}
CASES = INTEGERS | LANES


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", CASES)
def test_vector_int(name: str, arch: str) -> None:
    if arch not in CASES[name].archs:
        pytest.skip(f"{arch} does not have it")
    check(program(CASES, arch), name, CASES[name], rounds=6)
