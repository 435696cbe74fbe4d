"""Options, tables and JSON of the command line."""
