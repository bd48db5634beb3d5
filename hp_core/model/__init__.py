"""Building models, and weights in and out."""
