"""From a `StepPlan` to arrays, to the device, and back: the only part that knows JAX arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from ..grid import Array
from ..metadata import ChunkMetadata
from ..models.decoder import LanguageModel
from ..pool_rows import step_rows
from ..warming import WarmProgram, timed
from .buckets import Bucket, Buckets
from .engine_config import EngineConfig, PoolSizes
from .running import Decode, Part, StepPlan
from .sampling import Sampling
from .step import DecodeInputs, DeviceState, PrefillInputs, copy_rows, empty_state, run_step


@dataclasses.dataclass(frozen=True)
class StepHandle:
    """A submitted step: its sampled tokens on the device, and the shape that it ran in."""

    sampled: jax.Array
    decodes: int


class Runner:
    """Runs steps of a model, with all pools on its device.

    Args:
      model: the weights.
      config: the sizes.
      sizes: of the pools.
    """

    def __init__(self, model: LanguageModel, config: EngineConfig, sizes: PoolSizes) -> None:
        self._model, self._config, self._sizes = model, config, sizes
        self.buckets = Buckets.of(config, sizes)
        # Beside the weights, and committed as loaded ones are: what a step gives back is, and a
        # first step with anything else would be a program of its own.
        where = next(iter(jax.tree.leaves(model)[0].devices()))
        self._state: DeviceState = jax.device_put(empty_state(config, sizes, model.config), where)

    def submit(self, plan: StepPlan) -> StepHandle:
        """See `engine.Device`. Arrays are made anew: the device may still read the last ones."""
        tokens = sum(part.length for part in plan.parts)
        exports = plan.checkpoints.num_checkpoints > 0
        bucket = self.buckets.find(len(plan.decodes), tokens, exports)
        copies = [part for part in plan.parts if part.start and part.source != part.row]
        if copies:
            self._copy(copies)
        prefill = self._prefill_inputs(plan, bucket) if plan.parts else None
        decode = self._decode_inputs(plan.decodes, bucket.decodes) if plan.decodes else None
        sampled = self._run(prefill, decode, self._sampling(plan, bucket), exports)
        sampled.copy_to_host_async()
        return StepHandle(sampled, bucket.decodes)

    def fetch(self, handle: StepHandle) -> tuple[Array, Array]:
        """See `engine.Device`."""
        tokens = np.asarray(handle.sampled)
        return tokens[: handle.decodes], tokens[handle.decodes :]

    def warm(self, bucket: Bucket) -> WarmProgram:
        """Compiles and runs a step of that shape in which nothing has a row, a page or a slot."""
        capacity = bucket.capacity
        prefill = decode = None
        if capacity is not None:
            lengths = [0] * capacity.sequences
            metadata = ChunkMetadata.from_seq_lens(lengths, capacity=capacity)
            rows = step_rows(metadata, self._sizes.rows, [-1] * len(lengths))
            prefill = PrefillInputs(
                tokens=np.zeros(capacity.tokens, np.int32),
                metadata=metadata,
                rows=rows,
                start=np.zeros(len(lengths), np.int32),
                slot=np.full(len(lengths), self._config.max_requests, np.int32),
                table=self._tables([], len(lengths)),
            )
        if bucket.decodes:
            decode = self._decode_inputs((), bucket.decodes)
        exports = capacity is not None and capacity.checkpoints > 0
        rows_out = bucket.decodes + (capacity.sequences if capacity else 0)
        sampling = Sampling.greedy(rows_out)
        return WarmProgram(bucket, *timed(lambda: self._run(prefill, decode, sampling, exports)))

    def warm_copy(self) -> WarmProgram:
        """The same for the copies of rows."""

        def copy() -> DeviceState:
            self._copy([])
            return self._state

        return WarmProgram("copies of rows", *timed(copy))

    def _run(
        self,
        prefill: PrefillInputs | None,
        decode: DecodeInputs | None,
        sampling: Sampling,
        exports: bool,
    ) -> jax.Array:
        spec = self._sizes.spec
        backend = spec.checkpoint_backend if exports else spec.backend
        assert backend is not None
        sampled, self._state = run_step(
            self._model, self._state, prefill, decode, sampling, backend=backend
        )
        return sampled

    def _copy(self, parts: Sequence[Part]) -> None:
        size = self._config.max_prefills
        source, destination = np.zeros(size, np.int32), np.full(size, self._sizes.rows, np.int32)
        for i, part in enumerate(parts):
            source[i], destination[i] = part.source, part.row
        self._state = copy_rows(self._state, source, destination)

    def _prefill_inputs(self, plan: StepPlan, bucket: Bucket) -> PrefillInputs:
        capacity, parts = bucket.capacity, plan.parts
        assert capacity is not None
        metadata = plan.checkpoints.metadata(capacity=capacity)
        rows = step_rows(
            metadata,
            self._sizes.rows,
            [part.row for part in parts],
            has_initial_state=[part.start > 0 for part in parts],
            checkpoint_state_indices=plan.checkpoints.destination,
        )
        prompts = [part.running.request.prompt[part.start : part.stop] for part in parts]
        start = [part.start for part in parts]
        nowhere = self._config.max_requests
        slot = [part.running.slot if part.last else nowhere for part in parts]
        return PrefillInputs(
            tokens=metadata.pad_tokens(np.concatenate(prompts), 0),
            metadata=metadata,
            rows=rows,
            start=_padded(start, capacity.sequences, 0),
            slot=_padded(slot, capacity.sequences, nowhere),
            table=self._tables([part.running.table for part in parts], capacity.sequences),
        )

    def _decode_inputs(self, decodes: Sequence[Decode], size: int) -> DecodeInputs:
        running = [decode.running for decode in decodes]
        active = np.zeros(size, np.bool_)
        active[: len(decodes)] = True
        return DecodeInputs(
            start=_padded([decode.start for decode in decodes], size, 0),
            row=_padded([decode.row for decode in decodes], size, -1),
            slot=_padded([each.slot for each in running], size, 0),
            active=active,
            table=self._tables([each.table for each in running], size),
        )

    def _sampling(self, plan: StepPlan, bucket: Bucket) -> Sampling:
        """Of the decode rows, then of the parts; rows of padding are greedy."""
        rows = bucket.decodes + (bucket.capacity.sequences if bucket.capacity else 0)
        how = Sampling.greedy(rows)
        drawn = [(i, d.running, d.start + 1) for i, d in enumerate(plan.decodes)]
        drawn += [(bucket.decodes + i, p.running, p.stop) for i, p in enumerate(plan.parts)]
        for i, running, position in drawn:
            params = running.request.params
            how.temperature[i], how.top_p[i] = params.temperature, params.top_p
            how.seed[i], how.position[i] = params.seed, position
        return how

    def _tables(self, tables: Sequence[Array], size: int) -> Array:
        out = np.zeros((size, self._config.table_width), np.int32)
        if tables:
            out[: len(tables)] = tables
        return out


def _padded(values: Sequence[int], size: int, fill: int) -> Array:
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out
