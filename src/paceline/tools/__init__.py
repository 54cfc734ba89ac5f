"""Predicts, compares, tunes and diagnoses trainings, and reports on them.

- `plan`: predicts which method is fastest for a network and a model.
- `compare`: trains with several methods, and compares them.
- `auto`: ``method="auto"``: chooses the method during a training.
- `doctor`: finds the causes of slow steps.
- `report`: pages, tables, charts, records and traces of all of these.
"""
