"""What this family needs of its own, made of the replacements that fit any family."""
