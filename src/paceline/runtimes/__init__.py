"""Where workers live: the real world and the virtual one bring the same seams."""
