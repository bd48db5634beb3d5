"""A run's model as a plain Hugging Face directory: checked before the first step, written from any checkpoint."""
