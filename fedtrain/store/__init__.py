"""What survives kill -9: the run's rounds, and the bytes of updates and models by their digest."""

from .ledger import Ledger
from .runs import Checkpoint, Plan, Round, RunStore
from .spool import Spool

__all__ = ["Checkpoint", "Ledger", "Plan", "Round", "RunStore", "Spool"]
