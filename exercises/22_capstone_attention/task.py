"""The milestones of 22_capstone_attention are in `sage_lab.capstones.trials`; mistakes.toml has wrong kernels."""

from exercises.task import capstone

task = capstone("ATTENTION")
