"""Differential privacy of a site's updates: clipping, Gaussian noise, and the privacy budget spent."""

from .accountant import epsilon
from .gaussian import Gaussian

__all__ = ["Gaussian", "epsilon"]
