"""Benchmarks, run from the repository's root.

- `papers`: what five papers claim, and what paceline reaches: ``python -m benchmarks.papers``.
- `measure`: speed, predictions and accuracy: ``python -m benchmarks.measure.ddp_over_emulated_links``.
- `pictures`: timelines of methods and the README's plan, into ``docs/``.
- `ray_kills`: jobs on several Ray nodes, which are killed at random instants. `tests.chaos` kills all else.
- `workloads`: scripts that make the workloads that come with paceline.
"""
