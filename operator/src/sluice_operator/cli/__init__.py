"""The `sluice` command: `main` finds the subcommands, each other file is one."""
