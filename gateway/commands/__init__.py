"""Commands of the `sluice` command line, one module each."""
