"""A video model fine-tuned with SLA2, every ablation next to a full model that was fine-tuned alike (notebook 13)."""
