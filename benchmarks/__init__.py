"""Benchmarks: `python -m benchmarks.run --help`. Results and how to read them: results/cpu.md."""
