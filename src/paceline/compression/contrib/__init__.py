"""Compressors by names that researchers compare with; `plan` and `auto` try none of them unless it is named."""
