"""The Qwen3-VL-MoE family: the recipe that trains it."""
