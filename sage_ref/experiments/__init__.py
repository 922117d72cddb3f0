"""Measurements, each with its options and its command in one file."""
