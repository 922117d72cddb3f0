"""Capstones: a kernel from a blank page, and the trials that say whether it is right, and what is wrong."""
