"""The family's recipe, `train.yaml`."""
