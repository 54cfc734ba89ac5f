"""Output of results: reports, charts, records and traces of runs.

- `model`: a report as plain data; start here.
- `html`: a report as one HTML file.
- `terminal`: a report on the terminal; tables of a result and of a workload.
- `charts`: charts as SVG, by matplotlib.
- `timeline`: one step, cut out of a trace.
- `run_files`: the folder of a run's records.
- `traces`: Chrome traces.
"""
