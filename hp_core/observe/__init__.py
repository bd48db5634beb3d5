"""Metrics, trackers and progress."""
