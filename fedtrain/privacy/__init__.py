"""Differential privacy of what leaves a site: clip and noise, and what that costs."""

from .accountant import epsilon
from .gaussian import Gaussian

__all__ = ["Gaussian", "epsilon"]
