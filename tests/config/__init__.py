"""Tests of the recipe."""
