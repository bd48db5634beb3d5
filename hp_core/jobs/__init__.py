"""Job files for the schedulers that a recipe may run under: what `hp-train launch` prints."""
