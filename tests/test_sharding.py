"""Heads over devices: the same numbers, and nothing moves between the devices.

The checks run on 8 virtual CPU devices (virtual_devices.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from virtual_devices import Checks

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")

CHECKS = Checks(__file__)
check = CHECKS.check


class Setting:
    """A call on the virtual devices, and how its arrays lie on a mesh."""

    H, K, V = 8, 64, 16

    def __init__(self, explicit: bool = False) -> None:
        import jax
        from jax.sharding import AxisType

        from kda_jax.testing import make_case

        self.case = make_case(
            "random",
            seq_lens=[40, 0, 1, 70],
            H=self.H,
            K=self.K,
            V=self.V,
            chunk_size=16,
            initial_state=[True, True, False, True],
            checkpoint_offsets=[[7], [], [], [64]],
            capacity="bucket",
        )
        kind = AxisType.Explicit if explicit else AxisType.Auto
        self.mesh = jax.make_mesh((2, 4), ("data", "heads"), axis_types=(kind, kind))

    def specs(self, heads: str | None = "heads") -> tuple[Any, ...]:
        """Of (args, state, has, metadata)."""
        from jax.sharding import PartitionSpec as P

        args = (P(None, None, heads),) * 5 + (P(heads), P(heads))
        return args, P(None, heads), P(), P()

    def arrays(self) -> tuple[Any, ...]:
        case = self.case
        return case.args, case.initial_state, case.has_initial_state, case.metadata

    def placed(self) -> tuple[Any, ...]:
        """The arrays on the mesh: heads split over one axis, all else replicated."""
        import jax
        from jax.sharding import NamedSharding

        def put(x: Any, spec: Any) -> Any:
            return jax.device_put(x, NamedSharding(self.mesh, spec))

        args, *rest = self.arrays()
        specs, *others = self.specs()
        return (tuple(map(put, args, specs)), *map(put, rest, others))

    def results(self) -> Any:
        from jax.sharding import PartitionSpec as P

        from kda_jax import KDAResult

        return KDAResult(P(None, None, "heads"), P(None, "heads"), P(None, "heads"))

    @functools.cached_property
    def single(self) -> Any:
        """The result of one device."""
        return call("scan", *self.arrays())


def call(backend: str, args: Any, state: Any, has: Any, metadata: Any, **options: Any) -> Any:
    from kda_jax import chunk_kda_prefill

    given = {"initial_state": state, "has_initial_state": has, "metadata": metadata}
    return chunk_kda_prefill(*args, **given, backend=backend, **options)


def shard_map(setting: Setting, backend: str) -> Callable[..., Any]:
    import jax

    return jax.shard_map(
        functools.partial(call, backend),
        mesh=setting.mesh,
        in_specs=setting.specs(),
        out_specs=setting.results(),
    )


def loss(fn: Callable[..., Any], *arrays: Any) -> Any:
    import jax.numpy as jnp

    return sum(jnp.sum(jnp.sin(x)) for x in fn(*arrays))


def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    return jax.grad(functools.partial(loss, fn), argnums=(0, 1))


def trace(fn: Callable[..., Any], arrays: Any) -> None:
    """Where JAX's types of the devices could object; costs a fraction of a compilation."""
    import jax

    jax.jit(fn).trace(*arrays)


def run(
    fn: Callable[..., Any],
    arrays: Any,
    calls: int = 1,
    moves: bool = False,
    target: str = "kda_prefill_v1",
    **options: Any,
) -> Any:
    """Compiles and runs; the program has no collectives and that many custom calls."""
    from programs import quick_jit

    compiled = quick_jit(fn, **options).lower(*arrays).compile()
    text = compiled.as_text()
    found = [name for name in COLLECTIVES if name in text]
    assert moves or not found, f"the program holds {found}"
    have = text.count(f'custom_call_target="{target}"')
    assert have == calls, f"{have} custom calls, want {calls}"
    return compiled(*arrays)


def heads_of(x: Any, axis: int) -> Any:
    """The mesh axis of one array axis; every other one is replicated."""
    spec = tuple(x.sharding.spec)
    spec += (None,) * (x.ndim - len(spec))
    assert all(s is None for i, s in enumerate(spec) if i != axis), spec
    return spec[axis]


def assert_close(got: Any, want: Any, rtol: float = 1e-5) -> None:
    import jax

    from kda_jax.testing import relative_error

    for x, ref in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(x, ref) < rtol


def calls_of(backend: str) -> int:
    from kda_jax import supports

    return int(supports(backend).backend == "fused")


def assert_on_heads(result: Any) -> None:
    axes = [heads_of(x, axis) for x, axis in zip(result, (2, 1, 1), strict=True)]
    assert axes == ["heads"] * 3, axes


@check("fused", "auto", "chunked", "scan")
def jit_on_heads(backend: str) -> None:
    setting = Setting()
    result = run(functools.partial(call, backend), setting.placed(), calls_of(backend))
    assert_close(result, setting.single)
    assert_on_heads(result)


@check("fused", "auto", "chunked")
def jit_on_heads_of_an_explicit_mesh(backend: str) -> None:
    """Explicit axes are the default of `jax.make_mesh`."""
    setting = Setting(explicit=True)
    fn = functools.partial(call, backend)
    if backend == "chunked":
        return trace(fn, setting.placed())
    result = run(fn, setting.placed(), calls_of(backend))
    assert_close(result, setting.single)
    assert_on_heads(result)
    return None


@check("fused", "auto")
def jit_under_set_mesh(backend: str) -> None:
    """With explicit axes, whose shardings JAX would note in the partitioned call, too."""
    import jax

    setting = Setting(explicit=True)
    with jax.set_mesh(setting.mesh):
        result = run(functools.partial(call, backend), setting.placed(), calls_of(backend))
    assert_close(result, setting.single)
    assert_on_heads(result)


@check("fused", "auto", "chunked", "scan")
def shard_map_on_heads(backend: str) -> None:
    setting = Setting()
    fn = shard_map(setting, backend)
    if backend in ("chunked", "scan"):
        return trace(fn, setting.placed())
    result = run(fn, setting.placed(), calls_of(backend))
    assert_close(result, setting.single)
    assert_on_heads(result)
    return None


@check()
def gradients_on_heads() -> None:
    from programs import quick_jit

    setting = Setting()
    got = run(gradient(functools.partial(call, "fused")), setting.placed())
    assert_close(got, quick_jit(gradient(functools.partial(call, "scan")))(*setting.arrays()))
    args, state = got
    assert [heads_of(x, 2) for x in args[:5]] == ["heads"] * 5
    assert [heads_of(x, 0) for x in args[5:]] == ["heads"] * 2
    assert heads_of(state, 1) == "heads"


@check()
def gradients_on_an_explicit_mesh() -> None:
    trace(gradient(functools.partial(call, "fused")), Setting(explicit=True).placed())


@check()
def other_layout_and_no_state() -> None:
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    setting = Setting()
    args, _, has, metadata = setting.placed()
    state = jax.device_put(
        np.ascontiguousarray(setting.case.initial_state.swapaxes(2, 3)),
        NamedSharding(setting.mesh, P(None, "heads")),
    )
    fn = functools.partial(call, "fused", state_layout="kv", groups=2)
    result = run(fn, (args, state, has, metadata))
    assert_on_heads(result)
    out, *states = result
    assert_close((out, *(x.swapaxes(2, 3) for x in states)), setting.single)
    fresh = run(lambda *x: call("fused", x[0], None, None, x[1]), (args, metadata))
    assert_on_heads(fresh)
    assert_close(fresh, call("scan", setting.case.args, None, None, setting.case.metadata))


@check()
def vmap_keeps_heads_sharded() -> None:
    """The batch is folded into the heads, behind them."""
    import jax
    import jax.numpy as jnp

    setting = Setting()
    args, state, has, metadata = setting.placed()
    several = jax.tree.map(lambda x: jnp.stack([x, x[::-1] if x.ndim < 3 else -x]), (args, state))

    def many(several: Any, has: Any, metadata: Any) -> Any:
        return jax.vmap(lambda x: call("fused", *x, has, metadata))(several)

    result = run(many, (several, has, metadata))
    each = [jax.tree.map(lambda x, i=i: x[i], several) for i in range(2)]
    want = [call("scan", *x, has, metadata) for x in each]
    assert_close(result, jax.tree.map(lambda *x: jnp.stack(x), *want))


@check("tokens", "channels", "states")
def sharded_over_something_else(what: str) -> None:
    """Gathered first, instead of a kernel on a part of what it needs."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    setting = Setting()
    args, state, has, metadata = setting.arrays()
    spec = {"tokens": P(None, "heads"), "channels": P(None, None, None, "heads")}.get(what, P())
    put = functools.partial(jax.device_put, device=NamedSharding(setting.mesh, spec))
    args = tuple(put(x) if x.ndim == 4 else x for x in args)
    if what == "states":
        state = jax.device_put(state, NamedSharding(setting.mesh, P("heads")))
    result = run(functools.partial(call, "fused"), (args, state, has, metadata), moves=True)
    assert_close(result, setting.single)


@check()
def batch_and_heads_with_shard_map() -> None:
    """Without metadata: rows of the batch on one axis, heads on the other, and the gradients.

    The gate's weights lie whole on each row of the mesh, so their gradients sum over these rows:
    the one thing that must move.
    """
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P
    from programs import quick_jit

    from kda_jax import KDAResult

    setting = Setting()
    H, K, V = setting.H, setting.K, setting.V
    rng = np.random.default_rng(0)
    dims = [(4, 20, H, n) for n in (K, K, V, K)] + [(4, 20, H), (H,), (H, K)]
    args = [rng.standard_normal(d).astype(np.float32) for d in dims]
    specs = (P("data", None, "heads"),) * 5 + (P("heads"), P("heads"))
    placed = [
        jax.device_put(x, NamedSharding(setting.mesh, s)) for x, s in zip(args, specs, strict=True)
    ]
    by_row = P("data", "heads")
    split = jax.shard_map(
        lambda *args: call("fused", args, None, None, None),
        mesh=setting.mesh,
        in_specs=specs,
        out_specs=KDAResult(specs[0], by_row, by_row),
    )

    def scan(*args: Any) -> Any:
        return call("scan", args, None, None, None)

    # No checkpoints: by_row would take an axis without rows apart.
    assert_close(run(split, placed)[:2], scan(*args)[:2])
    got, want = (
        functools.partial(jax.grad(lambda fn, *x: loss(lambda *y: fn(*y)[:2], *x), range(1, 8)), fn)
        for fn in (split, scan)
    )
    assert_close(run(got, placed, moves=True), quick_jit(want)(*args))


@pytest.mark.parametrize("name", CHECKS.all)
def test_on_virtual_devices(name: str) -> None:
    CHECKS.assert_found_nothing(name)


if __name__ == "__main__":
    CHECKS.main()
