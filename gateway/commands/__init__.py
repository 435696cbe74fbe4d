"""The commands of `sluice`, one module each."""
