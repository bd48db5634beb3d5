"""No kind of parallelism needs anything of the family's own: plans are derived from the model of transformers."""
