"""Forward kernels, one idea per level; `program.py` holds what they share."""
