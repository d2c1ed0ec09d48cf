"""Benchmarks, one command each: `python -m benchmarks.node_path`. What they print is a ratio taken in one run."""
