"""FedRep: a site trains its own head first, and then the shared body beneath the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config.values import AtLeastOne
from ..learning import Contribution, Local
from .fedper import FedPer


@dataclass(frozen=True)
class FedRep(FedPer):
    """Collins et al. 2021, Algorithm 1; `local` names the head. The body is trained as [train] says."""

    trains_local: ClassVar[bool] = True
    head_epochs: AtLeastOne = 10

    def train(self, local: Local) -> Contribution:
        local.train(only="local", epochs=self.head_epochs)
        return self.finish(local.train(only="shared"), local)
