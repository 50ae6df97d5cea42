"""A pool whose heads lie on several devices: the same numbers, in place, and nothing moves.

The checks run on 8 virtual CPU devices (virtual_devices.py).
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from test_sharding import Setting, assert_close, calls_of, heads_of, run, trace
from virtual_devices import Checks

CHECKS = Checks(__file__)
check = CHECKS.check

run = functools.partial(run, target="kda_prefill_pool_v1")


class PoolSetting(Setting):
    """The call of `Setting` in a pool whose other rows hold NaN."""

    def __init__(self, explicit: bool = False) -> None:
        from kda_jax.testing_pool import pool_case

        super().__init__(explicit)
        self.pool_case = pool_case(self.case, without=[1])

    def arrays(self) -> tuple[Any, ...]:
        p = self.pool_case
        return p.case.args, p.pool, p.rows, p.case.metadata

    def specs(self, heads: str | None = "heads") -> tuple[Any, ...]:
        args, pool, *_, metadata = super().specs(heads)
        return args, pool, metadata, metadata

    def results(self) -> Any:
        from jax.sharding import PartitionSpec as P

        from kda_jax import KDAPoolResult

        return KDAPoolResult(P(None, None, "heads"), P(None, "heads"))

    def assert_right(self, got: Any) -> None:
        """The numbers of one device, sharded over heads, and the other rows as they were."""
        import numpy as np
        from cases import assert_same_bits

        p = self.pool_case
        want = call("scan", *self.arrays()[:1], jnp_array(p.pool), *self.arrays()[2:])
        assert_close(got.out, want.out)
        written = list(p.written)
        after = np.asarray(got.state_cache)
        assert_close(after[written], np.asarray(want.state_cache)[written])
        assert_same_bits(after[p.others], p.pool[p.others])
        assert heads_of(got.out, 2) == heads_of(got.state_cache, 1) == "heads"


def jnp_array(x: Any) -> Any:
    import jax.numpy as jnp

    return jnp.array(x)


def call(backend: str, args: Any, pool: Any, rows: Any, metadata: Any, **options: Any) -> Any:
    from kda_jax import chunk_kda_prefill

    given = {"state_cache": pool, "metadata": metadata} | rows._asdict()
    return chunk_kda_prefill(*args, **given, backend=backend, **options)


@check("fused", "auto", "chunked", "scan")
def jit_on_heads(backend: str) -> None:
    setting = PoolSetting()
    setting.assert_right(run(functools.partial(call, backend), setting.placed(), calls_of(backend)))


@check("fused", "chunked")
def donated_on_heads(backend: str) -> None:
    """Each device's part of the pool stays where it is."""
    setting = PoolSetting()
    arrays = setting.placed()
    places = [x.data.unsafe_buffer_pointer() for x in arrays[1].addressable_shards]
    got = run(functools.partial(call, backend), arrays, calls_of(backend), donate_argnums=1)
    assert arrays[1].is_deleted()
    after = [x.data.unsafe_buffer_pointer() for x in got.state_cache.addressable_shards]
    assert after == places
    setting.assert_right(got)


@check("fused", "auto", "chunked")
def jit_on_heads_of_an_explicit_mesh(backend: str) -> None:
    setting = PoolSetting(explicit=True)
    fn = functools.partial(call, backend)
    if backend == "chunked":
        return trace(fn, setting.placed())
    setting.assert_right(run(fn, setting.placed(), calls_of(backend)))
    return None


@check("fused", "chunked", "scan")
def shard_map_on_heads(backend: str) -> None:
    import jax

    setting = PoolSetting()
    fn = jax.shard_map(
        functools.partial(call, backend),
        mesh=setting.mesh,
        in_specs=setting.specs(),
        out_specs=setting.results(),
    )
    arrays = setting.placed()
    places = [x.data.unsafe_buffer_pointer() for x in arrays[1].addressable_shards]
    got = run(fn, arrays, calls_of(backend), donate_argnums=1)
    after = [x.data.unsafe_buffer_pointer() for x in got.state_cache.addressable_shards]
    assert after == places
    setting.assert_right(got)


@check()
def other_layout_and_groups() -> None:
    import jax
    import numpy as np

    setting = PoolSetting()
    args, pool, rows, metadata = setting.placed()
    turned = jax.device_put(np.ascontiguousarray(np.asarray(pool).swapaxes(2, 3)), pool.sharding)
    fn = functools.partial(call, "fused", state_layout="kv", groups=2)
    got = run(fn, (args, turned, rows, metadata))
    setting.assert_right(got._replace(state_cache=got.state_cache.swapaxes(2, 3)))


@check()
def a_pool_sharded_over_rows() -> None:
    """Gathered first: a kernel on a part of the rows would not find the others."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    setting = PoolSetting()
    args, pool, rows, metadata = setting.placed()
    whole = jax.device_put(pool[:8], NamedSharding(setting.mesh, P("data")))
    args = jax.device_put(args, NamedSharding(setting.mesh, P()))
    got = run(functools.partial(call, "fused"), (args, whole, rows, metadata), moves=True)
    want = call("scan", setting.arrays()[0], jnp_array(pool[:8]), rows, metadata)
    assert_close(got.out, want.out)


@pytest.mark.parametrize("name", CHECKS.all)
def test_on_virtual_devices(name: str) -> None:
    CHECKS.assert_found_nothing(name)


if __name__ == "__main__":
    CHECKS.main()
