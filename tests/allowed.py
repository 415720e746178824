"""What the people of a test's sites let happen there."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from fedtrain.config import Config, keep_policy, policy_from
from fedtrain.config.policy import changed
from fedtrain.errors import FedtrainError
from fedtrain.runtime.sites.approval import approve


def allowed(config: Config, *sites: str, masks: bool | None = None, **rules: Any) -> Config:
    """The settings, when these sites, or all whose keys lie here, have approved the task as it is now, and
    let themselves be asked for what the settings ask. Without a task or a key nothing is approved.

    `masks`: whether results leave in secure sums only; None: as secagg.enabled says.
    """
    own = {"secure_sums": config.secagg.enabled if masks is None else masks, "rounds": 10**9, **rules}
    with suppress(FedtrainError):
        for folder in approve(config, sites)[1]:
            policy = policy_from(folder)
            if (wanted := changed(policy, own)) != policy:
                keep_policy(folder, wanted)
    return config
