"""How an average is formed: schedules as data, and the one `Comm` over them."""

from paceline.collectives.schedule import Ring, Schedule, Transfer, Tree

__all__ = ["Ring", "Schedule", "Transfer", "Tree"]
