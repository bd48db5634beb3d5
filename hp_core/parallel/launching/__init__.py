"""Starting the ranks of a run on this machine, watching over them, and saying why they ended."""
