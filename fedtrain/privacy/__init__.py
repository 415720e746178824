"""Differential privacy: Gaussian noise, and what its releases cost."""

from .accountant import Release, check_accounting, epsilon
from .gaussian import Draws, Gaussian, refuse_moving_buffers

__all__ = ["Draws", "Gaussian", "Release", "check_accounting", "epsilon", "refuse_moving_buffers"]
