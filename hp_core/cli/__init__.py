"""The `hp-train` command, one module a command."""
