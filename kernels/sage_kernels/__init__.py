"""sage_kernels: SageBwd in Triton, level by level, from FlashAttention to INT8."""

from sage_ref import moved  # so that a former name of a module here, too, says where it is now

moved.install()
