"""The real runtime: one worker in one process."""
