"""Direct preference optimization: a model learns which of two answers to a prompt is the better one."""
