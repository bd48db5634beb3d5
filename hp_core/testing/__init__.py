"""Helpers for tests of this project and of plugins."""
