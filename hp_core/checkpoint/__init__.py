"""Saving and resuming runs."""
