"""The commands that measure something, each in one file with `add_options(parser)` and `NAME_command(options)`."""
