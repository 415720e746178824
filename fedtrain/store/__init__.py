"""What survives kill -9: the run's rounds, and the bytes of updates and models by their digest."""

from .ledger import Ledger
from .runs import Buffered, Checkpoint, Round, RoundPlan, RunStore, Turn, TurnState
from .spool import Spool

__all__ = [
    "Buffered", "Checkpoint", "Ledger", "Round", "RoundPlan", "RunStore", "Spool", "Turn", "TurnState",
]  # fmt: skip
