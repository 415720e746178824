"""Differential privacy: Gaussian noise, and what its releases cost."""

from .accountant import Release, check_accounting, epsilon
from .gaussian import Gaussian, refuse_moving_buffers

__all__ = ["Gaussian", "Release", "check_accounting", "epsilon", "refuse_moving_buffers"]
