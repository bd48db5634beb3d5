"""The components that ship with HyperParallel, registered like anyone's."""
