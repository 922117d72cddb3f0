"""The parts that all kernels share: tile helpers, the quantiser, launch settings."""
