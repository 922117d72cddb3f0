"""The commands that measure something, each in one file: what it does, `add_options(parser)` and `run(options)`."""
