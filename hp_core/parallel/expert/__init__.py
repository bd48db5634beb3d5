"""Expert parallelism: each rank of a group holds some experts of a mixture, and tokens travel to them."""
