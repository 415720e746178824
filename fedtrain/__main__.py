"""`python -m fedtrain` is the fedtrain command; torchrun needs a module to start."""

from .cli import main

main()
