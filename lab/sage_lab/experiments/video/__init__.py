"""A video model fine-tuned with SLA2, every ablation next to a full model that was fine-tuned alike (notebook 13).

plan       the arms, the settings, and the runs in the order of what they decide
runs       trains the arms and judges them
measures   losses, samples, attention, and the truths of made-up scenes, for every arm
verdicts   which of the paper's claims the rows support
speed      times of a step and of sampling, next to other attentions
pictures   film strips and GIFs
command    `python -m sage_lab video ...`
"""
