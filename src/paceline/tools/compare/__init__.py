"""Train with several methods, and compare them."""
