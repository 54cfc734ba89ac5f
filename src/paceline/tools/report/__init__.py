"""Results for people and programs: one object a run, tables, records, traces.

- `model`: a page as data; start here.
- `html`: a page as one file.
- `charts`, `plots`, `pictures`, `colours`: charts, and how all of them look.
- `terminal`: tables for people.
- `run_files`: the folder of a run's records.
- `traces`, `timeline`: Chrome traces, and one step cut out of them.
- `compressor_table`: the table of ``paceline profile --compression``.
"""
