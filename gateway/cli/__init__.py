"""The command line: `sluice` and its commands."""
