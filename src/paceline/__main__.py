"""``python -m paceline`` is the console script."""

from paceline.cli import main

main()
