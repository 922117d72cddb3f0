"""Training: the loop, a language model and a video model with their data, and what is captured from their attention.

Needs the packages that `lab/pyproject.toml` names.
"""
