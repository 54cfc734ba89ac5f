"""DS-Sync: workers average in small groups, which are shuffled from step to step."""
