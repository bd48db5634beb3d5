"""Recipe text to a frozen, located `TrainerConfig`."""
