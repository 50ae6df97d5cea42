"""How calls are split over devices: heads of the operator, and channels of the convolutions, are
independent, everything else is not.

Under `jax.jit` with sharded operands XLA asks the rule of the custom call; a program whose q, k, v
and states are sharded over heads then runs one call per device and moves nothing. Operands that are
sharded over anything else are gathered first. Under `jax.shard_map` the call is local already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from .metadata import ChunkMetadata
from .types import KDAConfig, KDAInputs, KDAPoolResult, KDAResult, StatePool

Result = TypeVar("Result", bound=tuple[Any, ...])


def split_over_heads(
    kernel: Callable[[KDAInputs, StatePool | None, ChunkMetadata], KDAResult | KDAPoolResult],
    inputs: KDAInputs,
    pool: StatePool | None,
    metadata: ChunkMetadata,
    config: KDAConfig,
) -> KDAResult | KDAPoolResult:
    """Calls ``kernel(inputs, pool, metadata)`` with a Shardy rule that shards heads only."""
    leaves, tree = jax.tree.flatten((inputs, pool, metadata))
    kind = KDAResult if pool is None else KDAPoolResult

    def flat(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(kernel(*jax.tree.unflatten(tree, leaves)))

    return kind(*split_by_rule(flat, leaves, sharding_rule(inputs, pool, config), "h"))


def split_by_rule(
    call: Callable[..., tuple[jax.Array, ...]], operands: Sequence[jax.Array], rule: str, free: str
) -> tuple[jax.Array, ...]:
    """Calls ``call(*operands)`` with a Shardy rule of which some factors may be sharded.

    Under `jax.shard_map` over all axes of the mesh the call is local and there is no rule to ask.

    Args:
      call: on whole arrays, or on what one device has of them.
      operands: arrays.
      rule: Shardy's, for the operands and the results.
      free: the factors that may be sharded, each a letter: as the first operand has it that has
        the factor.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.are_all_axes_manual:
        return varying_like(operands, call(*operands))

    def local(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        # Under `jax.set_mesh` jax 0.12 would note shardings on explicit axes, and XLA meets them
        # behind its partitioner: "No registered implementation for ... custom call to Sharding".
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return call(*leaves)

    sides = [[x.split() for x in side.split(",")] for side in rule.split("->")]

    def partition(mesh: Any, arg_shapes: Any, result_shapes: Any) -> tuple[Any, ...]:
        # The shapes carry the shardings that the caller has, also of what must come whole.
        sharded: dict[str, Any] = {}
        for factors, shape in zip(sides[0], arg_shapes, strict=True):
            # Where JAX knows of no mesh, all is on each device.
            spec = (*getattr(shape.sharding, "spec", ()), *[None] * len(factors))
            for factor, axis in zip(factors, spec, strict=False):
                if factor in free:
                    sharded.setdefault(factor, axis)
        args, results = (
            tuple(NamedSharding(mesh, PartitionSpec(*map(sharded.get, x))) for x in side)
            for side in sides
        )
        return mesh, local, results, args

    split = custom_partitioning(call)
    split.def_partition(
        partition=partition,
        sharding_rule=rule,
        # In the order in which the factors appear in the rule, as Shardy wants it.
        need_replication_factors=tuple(
            f for f in dict.fromkeys(rule) if f.isalpha() and f not in free
        ),
    )
    return varying_like(operands, tuple(split(*operands)))


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

    return jax.tree.map(cast, result)


def run_on_auto_axes(
    run: Callable[..., Result], like: jax.Array, results: Any, *args: Any
) -> Result:
    """``run(*args)`` with the explicit axes of a mesh handed to the partitioner.

    On explicit axes, the default of `jax.make_mesh`, JAX wants to know the sharding of every
    intermediate array.

    Args:
      run: the call.
      like: an array whose second axis (heads, channels) may be sharded.
      results: a leaf for each result of ``run``: those are sharded in their second axis as that
        array is, and in no other.
      *args: of the call.
    """
    sharding = jax.typeof(like).sharding
    if not sharding.mesh.explicit_axes:
        return run(*args)
    second = NamedSharding(sharding.mesh, PartitionSpec(None, sharding.spec[1]))
    automatic = jax.sharding.auto_axes(
        run,
        axes=sharding.mesh.explicit_axes,
        out_sharding=jax.tree.map(lambda _: second, results),
    )
    return automatic(*args)
