"""Runs side by side (`fedtrain compare`)."""
