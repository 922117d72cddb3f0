"""What the kernels for Hopper, written in Gluon, share."""
