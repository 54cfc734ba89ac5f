"""``paceline compression``: what each compressor sends, loses and keeps."""

from __future__ import annotations


def compression() -> None:
    """Print the page on all compressors (docs/compressors.md is made by this)."""
    from paceline.compression.table import compression_page

    print(compression_page(), end="")
