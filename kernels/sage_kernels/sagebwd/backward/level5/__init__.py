"""Level 5, Hopper: one pass over the tiles."""
