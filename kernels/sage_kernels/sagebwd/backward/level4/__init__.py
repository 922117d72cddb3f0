"""Level 4, Hopper: split backward by warps with different jobs."""
