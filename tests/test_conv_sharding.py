"""Short convolutions whose channels lie on several devices: each has a call of its own.

The call is a stand-in in plain JAX. The checks run on 8 virtual CPU devices (virtual_devices.py).
"""

from __future__ import annotations

from typing import Any

import pytest
from virtual_devices import Checks

CHECKS = Checks(__file__)
check = CHECKS.check
C = 64


REAL: Any = None  # conv_kernel._custom_call


def stand_in() -> list[Any]:
    """Takes the call's place; the parts that it has got."""
    import dataclasses

    from kda_jax import conv_kernel, native

    found: list[Any] = []
    status = dataclasses.replace(native.status(), convolutions=("cpu",))
    native.status = lambda: status

    def call(activation: Any, inputs: Any, metadata: Any) -> Any:
        found.append(inputs)
        return conv_kernel._in_plain_jax(activation, inputs, metadata)

    conv_kernel.devices.uncovered_here = lambda platform, built: None
    conv_kernel._custom_call = call
    return found


def arrays(channels: int = C) -> tuple[Any, ...]:
    import jax.numpy as jnp
    import numpy as np

    from kda_jax import ChunkMetadata

    rng = np.random.default_rng(0)
    shapes = [(14, channels)] * 2 + [(channels, 4)] * 2 + [(3, 2 * channels, 3)]
    x, y, v, w, state = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in shapes)
    metadata = ChunkMetadata.from_seq_lens([5, 0, 9], checkpoint_offsets=[[2], [], [9]])
    return (x, y), (v, w), state, metadata


def apply(xs: Any, weights: Any, state: Any, metadata: Any) -> Any:
    from kda_jax.conv import causal_conv1d_parts

    return causal_conv1d_parts(xs, weights, metadata, initial_state=state)


def plain(xs: Any, weights: Any, state: Any, metadata: Any) -> Any:
    import jax.numpy as jnp

    from kda_jax import conv_kernel

    states = tuple(jnp.split(state, 2, axis=1))
    inputs = conv_kernel.ConvInputs(tuple(xs), tuple(weights), states, None)
    ys, finals, insides = conv_kernel._in_plain_jax("silu", inputs, metadata)
    return ys, jnp.concatenate(finals, 1), jnp.concatenate(insides, 1)


def assert_same(got: Any, want: Any) -> None:
    import jax
    import numpy as np

    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=1e-2, atol=1e-2)


def placed(mesh: Any, channels: int = C) -> tuple[Any, ...]:
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    xs, weights, state, metadata = arrays(channels)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    xs = tuple(put(x, P(None, "x")) for x in xs)
    weights = tuple(put(w, P("x")) for w in weights)
    return xs, weights, put(state, P()), metadata


def collectives(compiled: Any) -> list[str]:
    names = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    return [name for name in names if name in compiled.as_text()]


@check("auto", "explicit")
def each_device_has_a_call(kind: str) -> None:
    import jax
    from jax.sharding import PartitionSpec as P

    calls = stand_in()
    axis = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}[kind]
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis,), devices=jax.devices()[:4])

    def run(xs: Any, weights: Any, metadata: Any) -> Any:
        from kda_jax.conv import causal_conv1d

        return causal_conv1d(xs[0], weights[0], metadata)

    with jax.set_mesh(mesh):
        xs, weights, state, metadata = placed(mesh)
        compiled = jax.jit(run).lower(xs, weights, metadata).compile()
        got = compiled(xs, weights, metadata)
    assert calls[-1].xs[0].shape == (14, C // 4), calls[-1].xs[0].shape
    assert not collectives(compiled), collectives(compiled)
    assert got.y.sharding.spec == P(None, "x")
    assert_same(got.y, plain(*arrays()[:2], 0 * arrays()[2], metadata)[0][0])


@check("auto")
def states_side_by_side(kind: str) -> None:
    import jax

    stand_in()
    mesh = jax.make_mesh(
        (4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,) * 1, devices=jax.devices()[:4]
    )
    args = placed(mesh)
    assert_same(jax.jit(apply)(*args), plain(*arrays()))


@check("auto")
def too_few_channels_for_the_kernel(kind: str) -> None:
    """Of 16 channels a device has four: plain JAX, on what it has."""
    import jax

    calls = stand_in()
    mesh = jax.make_mesh(
        (4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,) * 1, devices=jax.devices()[:4]
    )
    args = placed(mesh, 16)
    assert_same(jax.jit(apply)(*args), plain(*arrays(16)))
    assert all(x.shape[1] == 16 for call in calls for x in call.xs)


@check("auto")
def local_in_shard_map(kind: str) -> None:
    import jax
    from jax.sharding import PartitionSpec as P

    calls = stand_in()
    mesh = jax.make_mesh(
        (4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,) * 1, devices=jax.devices()[:4]
    )
    xs, weights, _, metadata = arrays()

    def run(xs: Any, weights: Any) -> Any:
        from kda_jax.conv import causal_conv1d_parts

        return causal_conv1d_parts(xs, weights, metadata).ys

    local = jax.shard_map(run, mesh=mesh, in_specs=(P(None, "x"), P("x")), out_specs=P(None, "x"))
    got = jax.jit(local)(xs, weights)
    assert calls[-1].xs[0].shape == (14, C // 4)
    assert_same(got, plain(xs, weights, 0 * arrays()[2], metadata)[0])


@check("auto")
def its_call_in_shard_map(kind: str) -> None:
    """The real call, lowered for a GPU: JAX follows what varies through it and its rules."""
    import dataclasses

    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from kda_jax import ChunkMetadata, conv_kernel, native
    from kda_jax.conv import causal_conv1d

    status = dataclasses.replace(native.status(), convolutions=("cuda",))
    native.status = lambda: status
    conv_kernel.devices.uncovered_here = lambda platform, built: None
    conv_kernel._custom_call = REAL
    mesh = jax.make_mesh(
        (4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]
    )
    x, w = jnp.ones((14, C), jnp.bfloat16), jnp.ones((C, 4))
    for offsets in (None, [[2, 14]]):
        metadata = ChunkMetadata.from_seq_lens([14], checkpoint_offsets=offsets)

        def run(x: Any, w: Any, metadata: Any = metadata) -> Any:
            return causal_conv1d(x, w, metadata)

        def loss(x: Any, w: Any) -> Any:
            return jax.lax.psum(run(x, w).y.astype("float32").sum(), "x")

        for specs in ((P(None, "x"), P("x")), (P(None, "x"), P()), (P(), P("x"))):
            local = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P(None, "x"))
            shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w)]
            for i, spec in enumerate(specs):  # what is not split has what a device has
                if spec == P():
                    axis = 1 - i
                    shape = list(shapes[i].shape)
                    shape[axis] //= 4
                    shapes[i] = jax.ShapeDtypeStruct(tuple(shape), shapes[i].dtype)
            lowered = jax.jit(local).trace(*shapes).lower(lowering_platforms=("cuda",))
            assert "kda_conv_v1" in lowered.as_text()
        grads = jax.shard_map(
            jax.grad(loss), mesh=mesh, in_specs=(P(None, "x"), P("x")), out_specs=P(None, "x")
        )
        jax.jit(grads).trace(x, w).lower(lowering_platforms=("cuda",))


@check("auto", "explicit")
def on_one_device_within_a_mesh(kind: str) -> None:
    """All arguments on the default device."""
    import jax

    stand_in()
    axis = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}[kind]
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis,), devices=jax.devices()[:4])
    args = arrays()
    with jax.set_mesh(mesh):
        got = jax.device_get(apply(*args))
    assert_same(got, plain(*args))


@check("explicit")
def parts_that_lie_otherwise(kind: str) -> None:
    """One part split and one whole: plain JAX."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from kda_jax.conv import causal_conv1d_parts
    from kda_jax.conv_kernel import ConvInputs, able

    stand_in()
    mesh = jax.make_mesh(
        (4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4]
    )
    (x, y), (v, w), _, metadata = arrays()
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P(None, "x")))
        y = jax.device_put(y, NamedSharding(mesh, P()))
        found = []

        def run(xs: Any, weights: Any) -> Any:
            found.append(able(ConvInputs(xs, weights, None, None)))
            return causal_conv1d_parts(xs[1:], weights[1:], metadata).ys

        jax.jit(run).lower((x, y), (v, w))
    assert found == [False]


@pytest.mark.parametrize("name", CHECKS.all)
def test_on_virtual_devices(name: str) -> None:
    CHECKS.assert_found_nothing(name)


if __name__ == "__main__":
    from kda_jax import conv_kernel

    REAL = conv_kernel._custom_call
    CHECKS.main()
