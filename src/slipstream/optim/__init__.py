"""Optimizers that tolerate delay, corrections for it, and learning-rate schedules."""
