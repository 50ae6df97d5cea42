"""Which implementation runs a call: the registry, and the policy for steps with checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import validate
from .chunked import ChunkedBackend
from .devices import platform_of
from .grid import check_chunk_size
from .metadata import ChunkMetadata
from .scan import ScanBackend
from .types import Backend, CallSpec, KDAConfig, KDAInputs, KDAResult

AUTO = "auto"
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


class Support(NamedTuple):
    """The answer of `supports`: true if the call can run, which backend runs it, and why."""

    supported: bool
    backend: str | None
    reason: str

    def __bool__(self) -> bool:
        return self.supported


class _Missing:
    """Stands in for "fused" when its module cannot be imported."""

    name = "fused"
    checkpoint_alignment = None

    def __init__(self, why: str) -> None:
        self._why = why

    def unsupported(self, spec: CallSpec) -> str | None:
        return self._why

    def run(self, inputs: KDAInputs, config: KDAConfig, metadata: ChunkMetadata) -> KDAResult:
        raise NotImplementedError(self._why)


@functools.cache
def _fused() -> tuple[Backend, Backend]:
    """The fused backend as an explicit name, and its portable form for "auto".

    Imported at first use: whatever is wrong with the native part, the rest of the library works.
    """
    try:
        from . import fused
    except Exception as error:
        why = f"its module does not load ({type(error).__name__}: {error}); use 'chunked'"
        missing = _Missing(why)
        return missing, missing
    return fused.FUSED, fused.FUSED_AUTO


def fused_loads() -> bool:
    """Whether the fused backend's module can be imported."""
    return not isinstance(_fused()[0], _Missing)


_registry: dict[str, Backend] = {"scan": ScanBackend(), "chunked": ChunkedBackend()}


def register_backend(backend: Backend, *, replace: bool = False) -> None:
    """Makes ``backend`` selectable as ``backend=backend.name``; see `Backend` for what it needs.

    "auto" does not pick registered backends: name the backend to use it.

    Raises:
      ValueError: the name is taken (pass ``replace=True`` for one that you registered) or reserved.
    """
    name = backend.name
    if name in (AUTO, "fused", "chunked", "scan"):
        raise ValueError(f"backend name {name!r} is reserved; choose another")
    if name in _registry and not replace:
        raise ValueError(f"backend {name!r} is registered already; pass replace=True to replace it")
    hash(backend)  # it becomes a static argument of jit
    _registry[name] = backend


def names() -> tuple[str, ...]:
    """The selectable backends, without "auto"."""
    return ("fused", "chunked", *(n for n in _registry if n != "chunked"))


def get(name: str) -> Backend:
    """The backend of that name.

    Raises:
      ValueError: there is none; lists the names.
    """
    if name == "fused":
        return _fused()[0]
    if not isinstance(name, str) or name not in _registry:
        raise ValueError(f"backend is {name!r}, want one of {(AUTO, *names())}")
    return _registry[name]


def resolve(name: str, spec: CallSpec) -> tuple[Backend, str]:
    """The backend that runs a call, and why.

    "auto" takes the first of fused and chunked that supports the call. An explicit name never
    falls back, with one exception that it asked for by carrying checkpoints: where the named
    backend cannot export states inside a prompt, that step, and only that step, runs on fused.

    Raises:
      ValueError: no backend has this name.
      NotImplementedError: the backend cannot run the call; says why and what to do.
    """
    if name == AUTO:
        return _resolve_auto(spec)
    backend = get(name)
    exports = backend.checkpoint_alignment is not None
    own = spec if exports else dataclasses.replace(spec, checkpoints=False)
    why = backend.unsupported(own)
    if why is not None:
        raise NotImplementedError(f"backend {name!r} cannot run this call: {why}")
    if exports or not spec.checkpoints:
        return backend, f"{name!r} is configured and supports the call"
    fused = _fused()[0]
    why = _cannot_export(fused, spec)
    if why is not None:
        raise NotImplementedError(
            f"backend {name!r} cannot export states inside a prompt, and 'fused', which such a "
            f"step would run on, cannot either: {why}. Split the prompt at the checkpoint, or "
            "configure 'auto'"
        )
    return fused, f"{name!r} cannot export states inside a prompt, so this step runs on 'fused'"


def _resolve_auto(spec: CallSpec) -> tuple[Backend, str]:
    refusals: list[str] = []
    for backend in (_fused()[1], get("chunked")):
        why = _cannot_export(backend, spec) if spec.checkpoints else backend.unsupported(spec)
        if why is None:
            return backend, "; ".join([*refusals, f"{backend.name!r} supports the call"])
        refusals.append(f"{backend.name!r} does not: {why}")
    raise NotImplementedError("no backend can run this call: " + "; ".join(refusals))


def _cannot_export(backend: Backend, spec: CallSpec) -> str | None:
    why = backend.unsupported(spec)
    if why is None and backend.checkpoint_alignment is None:
        return "it does not export states inside a prompt"
    return why


def check_alignment(backend: Backend, metadata: ChunkMetadata) -> None:
    """Refuses checkpoints off the backend's alignment, where the metadata can be read.

    Raises:
      ValueError: names the offset.
    """
    alignment = backend.checkpoint_alignment or 1
    if alignment == 1 or not metadata.on_host:
        return
    for sequence, offset in metadata.checkpoints[: metadata.num_checkpoints].tolist():
        if offset % alignment:
            raise ValueError(
                f"checkpoint_offsets: {offset} on sequence {sequence} is not a multiple of "
                f"{alignment}, the only places where backend {backend.name!r} exports states"
            )


def supports(
    backend: str = AUTO,
    *,
    platform: str | None = None,
    dtype: str = "bfloat16",
    K: int = 128,
    V: int = 128,
    H: int = 1,
    lower_bound: float | None = -5.0,
    chunk_size: int = 64,
    checkpoints: bool = False,
    groups: int | None = None,
) -> Support:
    """Whether `chunk_kda_prefill` can run a call, without running it.

    Args:
      backend: as in the operator.
      platform: "cpu", "cuda", "rocm" or "tpu"; None is the platform that a jit now would compile
        for.
      dtype: of q, k, v, raw_g and raw_beta.
      K, V, H: key channels, value channels, heads.
      lower_bound: as in the operator.
      chunk_size: of the metadata.
      checkpoints: whether the metadata carries checkpoints.
      groups: as in the operator.

    Returns:
      `Support`: true in a condition if the call can run; ``backend`` is the one that would run it.

    Raises:
      ValueError: no backend has this name, there is no such platform, or the operator takes no
        such argument.
    """
    platform = _known_platform(platform)
    name = jnp.dtype(dtype).name
    validate.check_dtype("dtype is", name)
    validate.check_sizes(H, K, V)
    validate.check_lower_bound(lower_bound)
    validate.check_options(None, "vk", groups)
    check_chunk_size(chunk_size)
    spec = CallSpec(
        platform=platform,
        q_dtype=name,
        k_dtype=name,
        v_dtype=name,
        g_dtype=name,
        beta_dtype=name,
        H=H,
        K=K,
        V=V,
        gate="softplus" if lower_bound is None else "bounded",
        chunk_size=chunk_size,
        checkpoints=checkpoints,
        groups=groups,
    )
    try:
        chosen, reason = resolve(backend, spec)
    except NotImplementedError as error:
        return Support(False, None, str(error))
    return Support(True, chosen.name, reason)


def checkpoint_alignment(
    backend: str = AUTO,
    *,
    platform: str | None = None,
    dtype: str = "bfloat16",
    K: int = 128,
    V: int = 128,
    H: int = 1,
    lower_bound: float | None = -5.0,
    chunk_size: int = 64,
    groups: int | None = None,
) -> int | None:
    """At multiples of how many tokens a step can export states; arguments as in `supports`.

    It is the alignment of the backend that a step with checkpoints goes to, which may differ from
    the configured one. None: no backend can, so a scheduler must split the prompt instead.
    """
    support = supports(
        backend,
        platform=platform,
        dtype=dtype,
        K=K,
        V=V,
        H=H,
        lower_bound=lower_bound,
        chunk_size=chunk_size,
        checkpoints=True,
        groups=groups,
    )
    return get(support.backend).checkpoint_alignment if support.backend else None


def _known_platform(platform: str | None) -> str:
    """The platform that is asked about."""
    current = current_platform()
    if platform is None:
        return current
    if platform not in (*PLATFORMS, current):  # JAX may run on one that is not listed
        both = "; JAX's 'gpu' is either 'cuda' or 'rocm'" if platform == "gpu" else ""
        raise ValueError(
            f"platform is {platform!r}, want one of {PLATFORMS}, or None for the one that JAX uses"
            f" now, {current!r}{both}"
        )
    return platform


def current_platform() -> str:
    """The platform that jit compiles for by default: "cpu", "cuda", "rocm" or another name."""
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    if default is None:
        default = jax.default_backend()
    if not isinstance(default, str):
        return platform_of(default)
    return default if default != "gpu" else platform_of(jax.devices(default)[0])
