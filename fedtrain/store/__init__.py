"""What survives kill -9: the run's rounds, and the bytes of updates and models by their digest."""

from .ledger import Ledger
from .runs import Buffered, Checkpoint, Plan, Round, RunStore, Turn, TurnState
from .spool import Spool

__all__ = [
    "Buffered", "Checkpoint", "Ledger", "Plan", "Round", "RunStore", "Spool", "Turn", "TurnState",
]  # fmt: skip
