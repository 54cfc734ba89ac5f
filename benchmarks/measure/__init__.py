"""Measurements of speed, predictions and accuracy: ``python -m benchmarks.measure.NAME``.

- `harness`: jobs of emulated hosts or processes, and sides that take turns in them.
- Speed beside PyTorch DDP: `ddp_over_loopback`, `planned_buckets`, `ddp_over_emulated_links`, `exact_overlap`, `auto`, `gradient_hooks`.
- Collectives and local updates: `collectives`, `local_updates`, `gloo_loops`, `compression`.
- Servers and aggregators: `server`, `aggregator`.
- Predictions: `agreement`, `regret`, `regret_emulated`, `simgrid_figures`, `virtual_scale`, `planning_time`.
- Faults that doctor finds: `doctor`, `doctor_training`.
- Accuracy against bsp: `accuracy`, `accuracy_tasks`, `local_accuracy`, `compression_accuracy`.
- `import_time`: what an import costs.
- `faults`: keeps what campaigns of faults have found (`tests.chaos`).
- `stored`: keeps figures for docs: the option `--store` of benchmarks.
- `page_tables`: writes the tables of docs that are made of stored results.
"""
