"""Tests of hp_core.data."""
