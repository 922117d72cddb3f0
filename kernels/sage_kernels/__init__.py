"""sage_kernels: SageBwd in Triton, level by level, from FlashAttention to INT8."""
