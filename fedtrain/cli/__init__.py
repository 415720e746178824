"""The `fedtrain` command: a shell over what fedtrain.api does."""

from .commands import cli, main

__all__ = ["cli", "main"]
