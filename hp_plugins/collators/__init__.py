"""Collators."""
