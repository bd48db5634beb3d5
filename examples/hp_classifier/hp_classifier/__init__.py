"""Sequence classification: one label for each text."""
