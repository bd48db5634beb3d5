"""Trainers, the step, loss accounting and evaluation."""
