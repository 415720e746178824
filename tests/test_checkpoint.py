"""Checkpoints: what is stored, that it is whole, and what happens when it isn't."""

import errno
import hashlib
import json
import math
import os
import resource
import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from fedtrain.errors import StoreError
from fedtrain.training.checkpoint import MANIFEST, Checkpoints, newest, plain, unplain
from fedtrain.training.places import Folder


class Run:
    """A model, Adam, a schedule and a place in the data, as a training loop has them."""

    def __init__(self, width=16):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.taken = 0

    def steps(self, count):
        for _ in range(count):
            g = torch.Generator().manual_seed(self.taken)
            self.optimizer.zero_grad()
            self.model(torch.randn(12, 8, generator=g)).square().mean().backward()
            self.optimizer.step()
            self.schedule.step()
            self.taken += 12
        return self

    def state_dict(self):
        for p in self.model.parameters():
            if p not in self.optimizer.state:
                zeros = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
                self.optimizer.state[p] = zeros
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "taken": self.taken,
        }

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        groups = state["optimizer"]["param_groups"]
        slots = {int(k): v for k, v in state["optimizer"]["state"].items()}
        self.optimizer.load_state_dict({"state": slots, "param_groups": groups})
        self.schedule.load_state_dict(state["schedule"])
        self.taken = state["taken"]

    def bits(self):
        digest = hashlib.sha256()
        for t in self.model.state_dict().values():
            digest.update(t.numpy().tobytes())
        return digest.hexdigest()


def checkpoints(where, **kwargs):
    kwargs.setdefault("background", False)
    return Checkpoints(where, **kwargs)


@pytest.mark.parametrize("background", [False, True])
def test_stop_and_resume_is_not_stopping_bit_for_bit(tmp_path, background):
    whole = Run().steps(10)
    first = checkpoints(tmp_path, background=background)
    first.save(4, Run().steps(4))
    first.close()
    again = Run()
    assert checkpoints(tmp_path).load(again) == 4
    again.steps(6)
    assert again.bits() == whole.bits()
    assert again.schedule.state_dict() == whole.schedule.state_dict()


def test_a_background_save_holds_the_state_of_its_step_whatever_training_does_next(tmp_path):
    run, saved = Run().steps(1), checkpoints(tmp_path, background=True)
    bits = run.bits()
    saved.save(1, run)
    run.steps(3)
    saved.close()
    again = Run()
    checkpoints(tmp_path).load(again)
    assert again.bits() == bits
