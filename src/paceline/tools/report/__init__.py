"""Results for people and programs: one object a run, tables, records, traces."""
