"""Metric trackers."""
