"""Data parallelism needs nothing of the family's own: FSDP2 shards each decoder layer as transformers builds it."""
