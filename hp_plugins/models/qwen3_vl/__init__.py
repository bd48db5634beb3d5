"""The Qwen3-VL family: the recipe that trains it."""
