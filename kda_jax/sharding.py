"""How the partitioner splits the custom call: heads are independent, everything else is not.

Under `jax.jit` with sharded operands XLA asks this rule; a program whose q, k, v and states are
sharded over heads then runs one custom call per device and moves nothing. Under `jax.shard_map` the
call is local already and the rule is not used.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.experimental.custom_partitioning import custom_partitioning

from .metadata import ChunkMetadata
from .types import KDAConfig, KDAInputs, KDAResult


def split_over_heads(
    kernel: Callable[[KDAInputs, ChunkMetadata], KDAResult],
    inputs: KDAInputs,
    metadata: ChunkMetadata,
    config: KDAConfig,
) -> KDAResult:
    """Calls ``kernel(inputs, metadata)`` with a Shardy rule that shards heads only."""

    def flat(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(kernel(*jax.tree.unflatten(tree, leaves)))

    def partition(mesh, arg_shapes, result_shapes):
        args, results = (
            jax.tree.map(lambda x: x.sharding, tuple(s)) for s in (arg_shapes, result_shapes)
        )
        return mesh, flat, results, args

    leaves, tree = jax.tree.flatten((inputs, metadata))
    call = custom_partitioning(flat)
    call.def_partition(
        partition=partition,
        sharding_rule=sharding_rule(inputs, config),
        # In the order in which the factors appear in the rule, as Shardy wants it.
        need_replication_factors=tuple("tkvnwcmz"),
    )
    return KDAResult(*call(*leaves))


def sharding_rule(inputs: KDAInputs, config: KDAConfig) -> str:
    """The Shardy rule of the call; every factor but ``h`` (heads) must be replicated.

    t: tokens, k and v: channels, n: sequences, c: chunks, m: checkpoints, w and z: table columns.
    """
    state = "h v k" if config.state_layout == "vk" else "h k v"
    rules = ("t h k", "t h k", "t h v", "t h k", "t h", "h", "h k", f"n {state}", "n")
    operands = [rule for rule, x in zip(rules, inputs, strict=True) if x is not None]
    tables = ["n w", "c w", "m z"]
    return ", ".join(operands + tables) + f" -> t h v, n {state}, m {state}"
