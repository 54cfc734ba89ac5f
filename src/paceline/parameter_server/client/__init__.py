"""A worker's end of its parameter servers."""
