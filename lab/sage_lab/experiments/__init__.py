"""The commands that measure something, each in one file with a dataclass of its name, an `Arguments`."""
