"""SLA2 (arXiv 2602.12675): sparse-linear attention with a learnable router, and SLA, which it builds on."""
