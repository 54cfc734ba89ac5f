"""Server processes: start, watch, snapshot and end them."""
