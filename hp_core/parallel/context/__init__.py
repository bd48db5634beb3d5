"""Context parallelism: the ranks of a group share each sequence, and attention sees all of it."""
