"""How the operator is split over devices: heads are independent, everything else is not.

Under `jax.jit` with sharded operands XLA asks the rule of the custom call; a program whose q, k, v
and states are sharded over heads then runs one call per device and moves nothing. Operands that are
sharded over anything else are gathered first. Under `jax.shard_map` the call is local already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from .metadata import ChunkMetadata
from .types import KDAConfig, KDAInputs, KDAPoolResult, KDAResult, StatePool

Result = TypeVar("Result", bound=KDAResult | KDAPoolResult)


def split_over_heads(
    kernel: Callable[[KDAInputs, StatePool | None, ChunkMetadata], KDAResult | KDAPoolResult],
    inputs: KDAInputs,
    pool: StatePool | None,
    metadata: ChunkMetadata,
    config: KDAConfig,
) -> KDAResult | KDAPoolResult:
    """Calls ``kernel(inputs, pool, metadata)`` with a Shardy rule that shards heads only.

    Under `jax.shard_map` over all axes of the mesh the call is local and there is no rule to ask.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.are_all_axes_manual:
        return kernel(inputs, pool, metadata)

    def flat(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(kernel(*jax.tree.unflatten(tree, leaves)))

    def local(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        # Under `jax.set_mesh` jax 0.12 would note shardings on explicit axes, and XLA meets them
        # behind its partitioner: "No registered implementation for ... custom call to Sharding".
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return flat(*leaves)

    rule = sharding_rule(inputs, pool, config)

    def partition(mesh: Any, arg_shapes: Any, result_shapes: Any) -> tuple[Any, ...]:
        # The shapes carry the shardings that the caller has, also of what must come whole.
        q = arg_shapes[0].sharding.spec
        heads = q[1] if len(q) > 1 else None

        def shardings(side: str) -> tuple[NamedSharding, ...]:
            axes = [[heads if f == "h" else None for f in x.split()] for x in side.split(",")]
            return tuple(NamedSharding(mesh, PartitionSpec(*x)) for x in axes)

        operands, results = map(shardings, rule.split("->"))
        return mesh, local, results, operands

    leaves, tree = jax.tree.flatten((inputs, pool, metadata))
    call = custom_partitioning(flat)
    call.def_partition(
        partition=partition,
        sharding_rule=rule,
        # In the order in which the factors appear in the rule, as Shardy wants it.
        need_replication_factors=tuple(f for f in dict.fromkeys(rule) if f.isalpha() and f != "h"),
    )
    kind = KDAResult if pool is None else KDAPoolResult
    return varying_like(leaves, kind(*call(*leaves)))


def sharding_rule(inputs: KDAInputs, pool: StatePool | None, config: KDAConfig) -> str:
    """The Shardy rule of the call; every factor but ``h`` (heads) must be replicated.

    t: tokens, k and v: channels, n: sequences, c: chunks, m: checkpoints, r: rows of a pool, w and
    z: table columns.
    """
    state = "h v k" if config.state_layout == "vk" else "h k v"
    rules = ("t h k", "t h k", "t h v", "t h k", "t h", "h", "h k", f"n {state}", "n")
    operands = [rule for rule, x in zip(rules, inputs, strict=True) if x is not None]
    results = f"t h v, n {state}, m {state}"
    if pool is not None:
        operands += [f"r {state}", "n", "n", "m"]
        results = f"t h v, r {state}"
    tables = ["n w", "c w", "m z"]
    return ", ".join(operands + tables) + f" -> {results}"


def varying_like(inputs: Any, result: Result) -> Result:
    """Types the results of an opaque call as differing between devices wherever an input does.

    `jax.shard_map` keeps track of that, and cannot look into the call.
    """

    def axes(x: jax.Array) -> frozenset[str]:
        return jax.typeof(x).manual_axis_type.varying

    varying = frozenset[str]().union(*map(axes, jax.tree.leaves(inputs)))

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(varying - axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return type(result)(*map(cast, result))


def run_on_auto_axes(
    run: Callable[[KDAInputs, StatePool | None, ChunkMetadata], KDAResult | KDAPoolResult],
    inputs: KDAInputs,
    pool: StatePool | None,
    metadata: ChunkMetadata,
) -> KDAResult | KDAPoolResult:
    """``run(inputs, pool, metadata)`` with the explicit axes of a mesh handed to the partitioner.

    On explicit axes, the default of `jax.make_mesh`, JAX wants to know the sharding of every
    intermediate array. The results are sharded over heads as v is, and over nothing else.
    """
    sharding = jax.typeof(inputs.v).sharding
    if not sharding.mesh.explicit_axes:
        return run(inputs, pool, metadata)
    by_head = NamedSharding(sharding.mesh, PartitionSpec(None, sharding.spec[1]))
    shardings = (
        KDAResult(by_head, by_head, by_head)  # type: ignore[arg-type]
        if pool is None
        else KDAPoolResult(by_head, by_head)  # type: ignore[arg-type]
    )
    automatic = jax.sharding.auto_axes(
        run, axes=sharding.mesh.explicit_axes, out_sharding=shardings
    )
    return automatic(inputs, pool, metadata)
