"""SageBwd: the two ladders of kernels, and the registered operation."""
