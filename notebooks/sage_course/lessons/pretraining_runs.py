"""Notebook 06b: a rule for a verdict, differences by seed, and the interval that a bootstrap gives their mean."""

import torch

from sage_course.gaps import Gap, Mistake


def paired(losses, baseline):
    return [losses[seed] - baseline[seed] for seed in losses if seed in baseline]


def resampled_means(values, choices):
    return values[choices].mean(-1)


def interval(means):
    return torch.quantile(means, means.new_tensor([0.025, 0.975]))


def verdict(low, high, gap, tokens, no_gap_at):
    if tokens <= no_gap_at:
        return "not tested"
    if low > 0:
        return "supported"
    return "contradicted" if high < gap else "undecided"


def _losses_by_seed() -> list[tuple]:
    return [
        ({0: 0.70, 1: 0.75, 2: 0.72}, {0: 0.71, 1: 0.73, 2: 0.73}),
        ({3: 0.80, 1: 0.75, 4: 0.60}, {1: 0.73, 2: 0.90, 3: 0.78}),  # another order, and a seed that is missing
    ]


def _values_and_choices() -> list[tuple]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, generator=generator, dtype=torch.float64)
    return [
        (torch.tensor([1.0, 2.0, 6.0]), torch.tensor([[0, 0, 0], [0, 1, 2], [2, 2, 1]])),
        (values, torch.randint(6, (6, 6), generator=generator)),
    ]


def _bounds() -> list[tuple]:
    intervals = [(0.5, 3.0), (-1.0, 1.0), (-1.0, 3.0), (-3.0, -1.0), (0.5, 1.5), (-3.0, 1.0)]
    tested = [(low, high, 2.1, 2**21, 2**18) for low, high in intervals]
    return [*tested, (0.5, 3.0, 2.1, 2**17, 2**18), (-1.0, 1.0, 2.1, 2**18, 2**18)]


GAPS = {
    "paired": Gap(paired, _losses_by_seed, (
        Mistake("[losses[seed] - baseline[seed] for seed in losses if seed in baseline]",
                "[x - y for x, y in zip(losses.values(), baseline.values())]",
                "That pairs by position. Pair by seed: in the second trial the two sides have different seeds."),
        Mistake("losses[seed] - baseline[seed]", "baseline[seed] - losses[seed]",
                "The other way round: a difference above zero means that `losses` is worse than the baseline."),
        Mistake("[losses[seed] - baseline[seed] for", "[losses[seed] - sum(baseline.values()) / len(baseline) for",
                "That is the distance from the mean of the baseline. Subtract the loss of the same seed."),
        Mistake("[losses[seed] - baseline[seed] for seed in losses if seed in baseline]",
                "{seed: losses[seed] - baseline[seed] for seed in losses if seed in baseline}",
                "Return a list that holds the differences alone."),
        Mistake("[losses[seed] - baseline[seed] for seed in losses if seed in baseline]",
                "[x - y for x in losses.values() for y in baseline.values()]",
                "That pairs every run with every other. Pair by seed."),
        Mistake(" if seed in baseline", "", "A seed that baseline lacks has no pair: leave it out."),
        Mistake("baseline[seed] for seed in losses if seed in baseline", "baseline.get(seed, 0) for seed in losses",
                "A seed that baseline lacks has no pair: leave it out. Its loss is not 0."),
    ), right=(
        ("[losses[seed] - baseline[seed] for seed in losses if seed in baseline]",
         "[loss - baseline[seed] for seed, loss in losses.items() if seed in baseline]"),
        ("[losses[seed] - baseline[seed]", "[torch.tensor(losses[seed] - baseline[seed])"),
    )),
    "resampled_means": Gap(resampled_means, _values_and_choices, (
        Mistake(".mean(-1)", ".mean(0)",
                "Each row of choices is one repetition: average along the row."),
        Mistake("values[choices].mean(-1)", "choices.double().mean(-1)",
                "choices holds positions. Average the values at these positions."),
        Mistake("values[choices]", "choices[values]", "The other way round: values[choices] gives the values there."),
        Mistake("values[choices]", "(values * choices)",
                "choices holds positions: values[choices] gives the values there."),
    ), right=(
        ("values[choices].mean(-1)", "values[choices].sum(1) / choices.shape[1]"),
        ("values[choices].mean(-1)", "torch.stack([values[choice].mean() for choice in choices])"),
    )),
    "interval": Gap(interval, lambda: [(torch.linspace(-1, 3, 401) ** 3,)], (
        Mistake("[0.025, 0.975]", "[0.05, 0.95]", "That leaves out 5% on either side: it is a 90% interval."),
        Mistake("[0.025, 0.975]", "[0.0, 1.0]", "That interval holds all means. Leave out the outer 5%."),
        Mistake("[0.025, 0.975]", "[0.975, 0.025]", "The lower end comes first."),
        Mistake("[0.025, 0.975]", "[2.5, 97.5]", "quantile takes shares between 0 and 1: 2.5% is 0.025."),
        Mistake("means.new_tensor([0.025, 0.975])", "[0.025, 0.975]",
                "quantile takes no list. means.new_tensor([...]) makes a tensor of it."),
        Mistake("[0.025, 0.975]", "[0.0, 0.95]", "Leave out as much below as above."),
        Mistake("torch.quantile(means, means.new_tensor([0.025, 0.975]))",
                "means.mean() + means.std() * means.new_tensor([-1.0, 1.0])",
                "One standard deviation either way holds about 68%."),
        Mistake("torch.quantile(means, means.new_tensor([0.025, 0.975]))",
                "(torch.quantile(means, 0.025), torch.quantile(means, 0.975))",
                "Return both ends in one tensor: give quantile a tensor with two shares."),
        Mistake("torch.quantile(means, means.new_tensor([0.025, 0.975]))",
                "means.mean() + means.std() * means.new_tensor([-2.0, 2.0])",
                "Two standard deviations hold about 95% of a Gaussian, but the means need not be one. Use quantiles."),
    ), right=(
        ("torch.quantile(means, means.new_tensor([0.025, 0.975]))",
         "torch.stack([means.quantile(0.025), means.quantile(0.975)])"),
        ("torch.quantile(means, means.new_tensor([0.025, 0.975]))",
         "means.double().quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))"),
    )),
    "verdict": Gap(verdict, _bounds, (
        Mistake("low > 0", "high > 0", "Supported: the whole interval is above zero, its lower end too."),
        Mistake("low > 0", "low > gap", "Supported: a gap was found. It need not be as large as the paper's."),
        Mistake("high < gap", "low < gap", "Contradicted: the whole interval lies below the paper's gap."),
        Mistake("high < gap", "high < 0",
                "The claim has a size. An interval that ends below the paper's gap contradicts it."),
        Mistake("low > 0", "low > 0 and high > gap",
                "Supported: the whole interval is above zero. The size of the paper's gap plays no part."),
        Mistake("high < gap", "high - low < gap",
                "Contradicted: the interval lies below the gap. Its width plays no part."),
        Mistake("high < gap", "low < 0 < high < gap",
                "An interval that lies wholly below zero contradicts a gap above zero, too."),
        Mistake("tokens <= no_gap_at", "tokens >= no_gap_at",
                "The other way round: batches that are too small do not test the claim."),
        Mistake("tokens <= no_gap_at", "tokens < no_gap_at",
                "A batch of the same size as the one without a gap does not test the claim either."),
        Mistake("tokens <= no_gap_at", "low <= 0",
                "Whether the claim was tested depends on the size of the batch, not on the result."),
    ), right=(
        ("    if low > 0:\n        return \"supported\"\n    return \"contradicted\"",
         "    return \"supported\" if low > 0 else \"contradicted\""),
    )),
}  # fmt: skip
