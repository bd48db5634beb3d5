"""The Qwen3-MoE family: its replacements and the recipe that trains it."""
