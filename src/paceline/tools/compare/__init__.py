"""Trains with several methods, and compares them.

- `runner`: one script with several methods, each in a process of its own; start here.
- `report`: the comparison as a report: headline, table, charts.
"""
