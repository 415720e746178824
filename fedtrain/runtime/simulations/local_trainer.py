"""A trainer without a process of its own."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from ...errors import FedtrainError
from ..trainers import trainer_messages as msg
from ..trainers.trainer import Trains, print_traceback
from ..trainers.trainer_messages import Failed
from ..trainers.workbench import Workbench

ONE_AT_A_TIME = threading.Lock()  # for what trains in this process, which has one set of random generators


class LocalTrainer(Trains):
    """A trainer in this very process. What is asked of it is answered at once, by the same code."""

    def __init__(self, bench: Workbench) -> None:
        self._bench, self.description = bench, bench.description

    async def _ask(self, message: msg.Start | msg.Command) -> Any:
        await asyncio.sleep(0)  # so that a run can be cancelled between batches
        assert not isinstance(message, msg.Start), message
        try:
            with ONE_AT_A_TIME:
                answer = self._bench.answer(message)
        except FedtrainError:
            raise
        except Exception as e:  # torch and the user's code run in this block
            raise Failed.of(e).error() from e
        for failed in msg.failures_in(answer):
            print_traceback(failed)
        return answer
