"""Predict, compare, tune and diagnose trainings, and report on them.

- `plan`: predicts which method a network and a model want.
- `compare`: trains with several methods, and compares them.
- `auto`: ``method="auto"``: chooses the method during a training.
- `doctor`: finds what slows a training down.
- `report`: pages, tables, charts, records and traces of all of these.
"""
