"""A video model fine-tuned with SLA2, every ablation beside a full model that was fine-tuned alike (notebook 13).

plan       the arms, the runs in the order of what they decide, and what they should cost
measures   what every arm is asked: losses, samples, attention, the truths of made-up scenes
runs       works off the plan, killed and resumed
verdicts   which of the paper's claims the rows support
speed      a step and sampling, beside other attentions
pictures   film strips and GIFs of samples
command    `python -m sage_lab video ...`
"""
