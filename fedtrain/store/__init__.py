"""What survives kill -9: the run's rounds, and the bytes of updates and models by their digest."""

from .ledger import Ledger
from .rounds import AGREED, Checkpoint, Round, RoundPlan
from .runs import RunStore
from .spool import Spool
from .turns import Buffered, Turn, TurnState

__all__ = [
    "AGREED", "Buffered", "Checkpoint", "Ledger", "Round", "RoundPlan", "RunStore", "Spool", "Turn",
    "TurnState",
]  # fmt: skip
