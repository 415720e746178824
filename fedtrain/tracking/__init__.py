"""What happened, for people and programs beside the run: events, the board they fold into, screens, export.

Nothing here is needed for a run to go on; see store/ for that.
"""

from .board import Board
from .log import EventLog

__all__ = ["Board", "EventLog"]
