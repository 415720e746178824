"""Simulations over a grid or a random sample of settings (`fedtrain sweep`)."""
