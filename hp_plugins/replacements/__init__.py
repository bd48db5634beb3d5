"""Replacements for modules of transformers, whatever the family: norms, attention, experts and feed-forwards."""
