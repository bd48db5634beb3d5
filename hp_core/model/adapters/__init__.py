"""Adapters of the library `peft` in a model that is still to be sharded, and their first weights."""
