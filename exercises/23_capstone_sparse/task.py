"""The milestones of 23_capstone_sparse are in `sage_lab.capstones.trials`; mistakes.toml has wrong kernels."""

from exercises.task import capstone

task = capstone("SPARSE")
