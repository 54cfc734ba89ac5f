"""Local updates: their laws, in the simulated runtime."""
