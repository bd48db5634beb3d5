"""Documents to token caches, packed rows, one global order and batches."""
