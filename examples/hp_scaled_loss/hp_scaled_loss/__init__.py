"""The model's own loss, scaled."""
