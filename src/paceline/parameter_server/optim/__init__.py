"""torch's optimizers, applied to parts of their parameters."""
