"""Trains the tiny Kimi-K3 that answers from a list of facts; `python -m benchmarks.recall`."""
