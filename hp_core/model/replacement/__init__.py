"""Replacing modules inside a model: claimed, built, validated and installed together, or not at all."""
