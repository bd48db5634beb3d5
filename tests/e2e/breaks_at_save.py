"""A one-file plugin whose hook breaks when a checkpoint is there."""

from hp_core import hookimpl


@hookimpl
def on_checkpoint(run, path):
    if run.setup.rank == 0:
        raise RuntimeError("the save broke")
