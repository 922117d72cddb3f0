"""Programs that measure the kernels: time, accuracy, machine code, launch tables."""
