"""Local updates: their laws, in the virtual world."""
