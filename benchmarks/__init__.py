"""Benchmarks, run from the repository's root.

- `papers`: what five papers claim, and what paceline reaches: ``python -m benchmarks.papers``.
- `measure`: speed, predictions and accuracy: ``python -m benchmarks.measure.ddp_comparison``.
- `pictures`: timelines of methods and the README's plan, into ``docs/``.
- `aggregator_kills`, `launcher_kills`, `ray_kills`, `survive_kills`: jobs of which something is killed
  at random instants.
- `workloads`: scripts that make the workloads that come with paceline.
"""
