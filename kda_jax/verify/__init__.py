"""Is this installation right on these devices? Results, exactness and hazards, on each of them.

    report = kda_jax.verify.run()          # or, with a table: python -m kda_jax verify
    assert report["passed"]

Every backend is compared with the "scan" backend in float64, computed on the CPU. A call that a
backend does not claim is reported as unsupported, which fails nothing; a call that it claims and
gets wrong does. Needs nothing beyond the library itself.
"""

from .runner import BACKENDS, Result, Step, run, steps

__all__ = ["BACKENDS", "Result", "Step", "run", "steps"]
