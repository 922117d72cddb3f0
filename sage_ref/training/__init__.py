"""Text as tokens, training, and what is captured from it. Needs the extra packages of `sage-ref[training]`."""
