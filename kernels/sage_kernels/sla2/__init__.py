"""SLA2 in Triton: routing, the sparse and the linear branch, forward and backward."""
