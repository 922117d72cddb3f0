"""A reader's own forward kernel: trials that say whether it is right, and levels to climb."""
