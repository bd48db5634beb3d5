"""Measurements that are run by hand: `python -m tests.benchmarks NAME`. The last line of output is one JSON object."""
