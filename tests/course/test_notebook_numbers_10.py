"""The numbers that notebook 10 claims, on the same inputs."""

import matplotlib.pyplot as plt
import pytest
import torch
from torch.testing import assert_close

from sage_ref.course.figures import draw_block_mass, draw_singular_values, panels, sparsity_figure
from sage_ref.records import RECORDED
from sage_ref.sla2 import (
    FEATURE_MAPS,
    BlockSettings,
    block_count,
    block_mass,
    feature_map,
    heuristic_scores,
    into_blocks,
    key_block_sums,
    linear_branch,
    mix,
    per_query,
    selected_count,
    sparse_branch,
    spread_blocks,
    top_blocks,
    weighted_sums,
)
from sage_ref.tracing import relative_l2
from sage_ref.training.capture import read_capture
from sage_ref.training.video_like import VideoLike, video_like

SETTINGS = BlockSettings(block_q=16, block_kv=8)
N, BLOCKS, HEAD_DIM = 1024, 128, 32
NAMES = ("layer 2", "layer 4", "structured")


@pytest.fixture(autouse=True, scope="module")
def closed_figures():
    yield
    plt.close("all")


def projected(features, target):
    """Proj(features) with the Proj, weight and bias, that comes closest to target."""
    x = torch.cat((features, torch.ones_like(features[..., :1])), -1)
    return x @ torch.linalg.lstsq(x.flatten(0, -2), target.flatten(0, -2)).solution


def best_alpha(o_s, x, o):
    step, target = (into_blocks(y, SETTINGS.block_q) for y in (o_s - x, o - x))
    return (step * target).sum((-2, -1)) / step.square().sum((-2, -1))


class Split:
    """Everything the notebook computes for one data set and mask."""

    def __init__(self, q, k, v):
        self.qkv = q, k, v
        self.p = torch.softmax(q @ k.mT / HEAD_DIM**0.5, -1)
        self.o = self.p @ v
        self.mass = block_mass(q, k, SETTINGS)
        self.scores = {"heuristic": heuristic_scores(q, k, SETTINGS), "oracle": self.mass}
        self.chosen = {}

    def choose(self, who="heuristic", sparsity=0.9):
        """M, alpha of each query, of each block of queries, O_s, O_l and R."""
        if (who, sparsity) not in self.chosen:
            self.chosen[who, sparsity] = self._choose(who, sparsity)
        return self.chosen[who, sparsity]

    def _choose(self, who, sparsity):
        mask = top_blocks(self.scores[who], selected_count(sparsity, BLOCKS))
        selected = spread_blocks(mask, N, N, SETTINGS)
        alpha = (self.p * selected).sum(-1, keepdim=True)
        rest = self.p * ~selected @ self.qkv[2] / (1 - alpha)
        o_s, _ = sparse_branch(*self.qkv, mask, SETTINGS)
        o_l = linear_branch(*self.qkv, ~mask, SETTINGS)
        return mask, alpha, (self.mass * mask).sum(-1), o_s, o_l, rest

    def held_by_best(self, sparsity):
        return (self.mass * top_blocks(self.mass, selected_count(sparsity, BLOCKS))).sum(-1).mean().item()

    def error(self, x):
        return relative_l2(x, self.o)

    def mixed(self, o_s, x, block_alpha):
        return mix(o_s, x, per_query(block_alpha, N, SETTINGS))


@pytest.fixture(scope="module")
def splits():
    layers = read_capture(RECORDED / "capture_video.safetensors").layers
    tensors = {f"layer {number}": x for number, x in layers.items()} | {"structured": video_like(VideoLike())[0]}
    return {name: Split(*(x[part][:1].double() for part in ("query", "key", "value"))) for name, x in tensors.items()}


@pytest.fixture(scope="module")
def layer2(splits):
    return splits["layer 2"]


class TestMass:
    def test_the_best_blocks_hold_little_in_the_small_model_and_most_in_the_structured_data(self, splits):
        assert list(splits) == list(NAMES)
        for name in ("layer 2", "layer 4"):
            assert 0.2 < splits[name].held_by_best(0.95) < 0.35
            assert 0.8 < splits[name].held_by_best(0.5) < 0.9
        assert splits["structured"].held_by_best(0.95) > 0.75

    @pytest.mark.parametrize("name", NAMES)
    def test_the_heuristic_is_better_than_chance_and_worse_than_the_oracle(self, splits, name):
        of_heuristic = splits[name].choose()[2].mean().item()
        assert selected_count(0.9, BLOCKS) / BLOCKS < of_heuristic < splits[name].held_by_best(0.9)

    def test_alpha_differs_between_blocks_of_queries(self, layer2):
        low, high = layer2.choose()[2].flatten().quantile(torch.tensor([0.05, 0.95], dtype=torch.float64))
        assert high > 3 * low


class TestBranches:
    def test_the_split_is_exact_and_what_dropping_p2_costs(self, layer2):
        _, alpha, _, o_s, _, rest = layer2.choose()
        assert_close(mix(o_s, rest, alpha), layer2.o)
        assert_close(o_s - layer2.o, (1 - alpha) * (o_s - rest))
        assert layer2.error(o_s) < layer2.error(alpha * o_s)

    @pytest.mark.parametrize("kind", FEATURE_MAPS)
    def test_linear_attention_alone_is_between_the_mean_and_the_sparse_branch(self, layer2, kind):
        q, k, v = layer2.qkv
        mask, _, _, o_s, _, _ = layer2.choose()
        weights = feature_map(q, kind) @ feature_map(k, kind).mT
        weights = weights / weights.sum(-1, keepdim=True)
        alone = linear_branch(q, k, v, torch.ones_like(mask), BlockSettings(16, 8, feature_map=kind))
        assert_close(alone, weights @ v)
        mean = v.mean(-2, keepdim=True).expand_as(v)
        assert layer2.error(o_s) < layer2.error(alone) < layer2.error(mean)
        used, used_by_softmax = (torch.exp(-torch.special.xlogy(x, x).sum(-1)).mean() for x in (weights, layer2.p))
        assert used > 2 * used_by_softmax

    def test_feature_maps_are_little_better_than_a_mean(self, layer2):
        q, k, v = layer2.qkv
        mask, _, held, o_s, _, rest = layer2.choose()
        unselected = (~spread_blocks(mask, N, N, SETTINGS)).double()
        found = {kind: linear_branch(q, k, v, ~mask, BlockSettings(16, 8, feature_map=kind)) for kind in FEATURE_MAPS}
        found["mean"] = unselected @ v / unselected.sum(-1, keepdim=True)
        errors = {name: layer2.error(layer2.mixed(o_s, x, held)) for name, x in found.items()}
        assert errors["softmax"] < errors["relu"] < 1.02 * errors["softmax"] < errors["elu+1"] < errors["mean"]
        assert errors["mean"] < 1.2 * errors["softmax"]
        assert min(relative_l2(x, rest) for x in found.values()) > 0.5


class TestMix:
    def test_a_perfect_linear_branch_hardly_helps_sla(self, layer2):
        _, alpha, _, o_s, o_l, rest = layer2.choose()
        real, perfect = (layer2.error(o_s + projected(x, layer2.o - o_s)) for x in (o_l, rest))
        assert 0.9 * real < perfect < real < layer2.error(o_s)
        assert layer2.error(mix(o_s, rest, alpha)) < 1e-12

    @pytest.mark.parametrize("name", NAMES)
    def test_what_each_obstacle_costs(self, splits, name):
        split = splits[name]
        _, alpha, held, o_s, _, rest = split.choose()
        repair = split.o - o_s
        repairs = (
            projected(rest, repair),
            projected(torch.cat((rest, o_s), -1), repair),
            (1 - alpha.mean()) * (rest - o_s),
            (1 - per_query(held, N, SETTINGS)) * (rest - o_s),
        )
        alone, with_o_s, one, of_block = (1 - relative_l2(x, repair) ** 2 for x in repairs)
        assert alone < 0.25 < one < of_block
        assert alone < with_o_s < of_block
        assert (one > 0.9) == (name != "structured")
        assert of_block - one > (0.2 if name == "structured" else 0.01)

    def test_the_best_alpha_is_the_mass_only_with_the_exact_rest(self, layer2):
        _, _, held, o_s, o_l, rest = layer2.choose()
        assert (best_alpha(o_s, rest, layer2.o) - held).abs().mean() < 0.05
        real = best_alpha(o_s, o_l, layer2.o)
        assert (real > held).double().mean() > 0.8
        assert real.mean() > 1.5 * held.mean()
        b, g = torch.linalg.lstsq(torch.stack((o_s.flatten(), o_l.flatten()), -1), rest.flatten()[:, None]).solution
        assert 0.1 < b < g

    @pytest.mark.parametrize("name", NAMES)
    def test_the_mix_wins_at_high_sparsity(self, splits, name):
        split = splits[name]
        for sparsity in (0.9, 0.97):
            _, _, held, o_s, o_l, _ = split.choose(sparsity=sparsity)
            _, _, oracle_held, oracle_o_s, oracle_o_l, _ = split.choose("oracle", sparsity)
            fitted = split.mixed(o_s, o_l, best_alpha(o_s, o_l, split.o))
            mixed, sla = split.mixed(o_s, o_l, held), o_s + projected(o_l, split.o - o_s)
            assert split.error(fitted) < split.error(mixed) < min(split.error(sla), split.error(o_s))
            assert split.error(split.mixed(oracle_o_s, oracle_o_l, oracle_held)) < split.error(mixed)

    def test_at_half_sparsity_the_true_mass_is_worse_than_dropping(self, layer2):
        _, _, held, o_s, o_l, _ = layer2.choose(sparsity=0.5)
        assert layer2.error(layer2.mixed(o_s, o_l, held)) > layer2.error(o_s)

    @pytest.mark.parametrize(("sparsity", "formula_wins"), [(0.8, False), (0.97, True)])
    def test_formula_against_mask(self, layer2, sparsity, formula_wins):
        _, _, held, o_s, o_l, _ = layer2.choose(sparsity=sparsity)
        oracle_o_s = layer2.choose("oracle", sparsity)[3]
        assert (layer2.error(layer2.mixed(o_s, o_l, held)) < layer2.error(oracle_o_s)) == formula_wins

    def test_most_mass_is_not_least_error(self, splits):
        split = splits["layer 4"]
        of_heuristic, of_oracle = (split.choose(who, 0.97) for who in ("heuristic", "oracle"))
        assert of_oracle[2].mean() > of_heuristic[2].mean()
        assert split.error(of_oracle[3]) > split.error(of_heuristic[3])


class TestRank:
    def test_p2_is_low_rank_without_single_weights_not_without_guessed_blocks(self, layer2):
        p = layer2.p[0].float()
        kept = {"elements": top_blocks(p, round(0.1 * N))}
        kept |= {who: spread_blocks(layer2.choose(who)[0][0], N, N, SETTINGS) for who in ("heuristic", "oracle")}
        energy = {name: torch.linalg.svdvals(p * ~mask).square() for name, mask in kept.items()}
        energy["P"] = torch.linalg.svdvals(p).square()
        stable = {name: (x.sum(-1) / x[..., 0]).mean() for name, x in energy.items()}
        left = {name: x[..., HEAD_DIM:].sum(-1).sqrt().mean() for name, x in energy.items()}
        assert stable["elements"] < stable["P"] / 4
        assert stable["elements"] < stable["oracle"] < stable["heuristic"]
        assert stable["heuristic"] > stable["P"] / 1.5
        assert left["elements"] < left["oracle"] < left["heuristic"] < left["P"]

    def test_the_mask_makes_a_low_rank_matrix_a_high_rank_one(self, layer2):
        q, k, _ = (x[0, 0] for x in layer2.qkv)
        weights = q.softmax(-1) @ k.softmax(-1).mT
        selected = spread_blocks(layer2.choose()[0][0, 0], N, N, SETTINGS)
        assert torch.linalg.matrix_rank(weights) == HEAD_DIM
        assert torch.linalg.matrix_rank(weights * ~selected) > 10 * HEAD_DIM


class TestComplement:
    def test_one_matmul_gives_the_sums_and_reads_every_block_once(self, layer2):
        q, k, v = (x[0, 0] for x in layer2.qkv)
        mask = layer2.choose()[0][0, 0]
        h, z = key_block_sums(k.softmax(-1), v, SETTINGS)
        h_i, z_i = weighted_sums((~mask).double(), h, z)
        blocks_read = 0
        for i, row in enumerate(mask):
            unselected = (~row).nonzero().flatten()
            blocks_read += len(unselected)
            assert_close(h_i[i], sum(h[j] for j in unselected))
            assert_close(z_i[i], sum(z[j] for j in unselected))
        assert 50 < blocks_read / BLOCKS < 64

    def test_bytes_at_the_size_of_the_paper(self):
        query_blocks, key_blocks = block_count(32760, 128), block_count(32760, 64)
        unselected = key_blocks - selected_count(0.97, key_blocks)
        naive = 4 * 12 * query_blocks * unselected * 128 * 129
        assert naive == pytest.approx(100e9, rel=0.02)
        assert 2 * 12 * query_blocks * key_blocks * 128 * 129 < 0.01 * 4 * 12 * 32760**2 * 128

    def test_seeing_every_block_matters_in_principle_and_hardly_in_numbers(self, layer2):
        mask, alpha, held, o_s, o_l, rest = layer2.choose()
        o_all = linear_branch(*layer2.qkv, torch.ones_like(mask), SETTINGS)
        assert layer2.error(mix(o_s, layer2.o, alpha)) > 0.1 > layer2.error(mix(o_s, rest, alpha))

        def ratio(formula):
            return layer2.error(formula(o_all)) / layer2.error(formula(o_l))

        true_mass = ratio(lambda x: layer2.mixed(o_s, x, held))
        fitted = ratio(lambda x: layer2.mixed(o_s, x, best_alpha(o_s, x, layer2.o)))
        sla = ratio(lambda x: o_s + projected(x, layer2.o - o_s))
        assert 0.95 < true_mass < 1 < fitted < sla < 1.05

    def test_values_of_a_selected_block_stay_out_of_the_complement(self, layer2):
        q, k, v = layer2.qkv
        mask = layer2.choose()[0]
        block = mask.double().mean((0, 1, 2)).argmax().item()
        huge = v.clone()
        huge[..., 8 * block : 8 * (block + 1), :] += 1000
        selecting = mask[..., block].repeat_interleave(16, -1)
        for weights, stays in ((~mask, True), (torch.ones_like(mask), False)):
            before, after = (linear_branch(q, k, x, weights, SETTINGS)[selecting] for x in (v, huge))
            assert torch.equal(before, after) == stays


class TestFigures:
    def test_sparsity(self, layer2):
        figure = sparsity_figure(*layer2.qkv, (0.5, 0.9), SETTINGS)
        maps = [ax for ax in figure.axes if ax.images]
        for ax, sparsity in zip(maps, (0.5, 0.9), strict=True):
            mask, _, held, o_s, o_l, _ = layer2.choose(sparsity=sparsity)
            mixed = layer2.error(layer2.mixed(o_s, o_l, held))
            assert ax.get_title() == (
                f"sparsity {sparsity:.0%}: {held.mean():.0%} of the mass\n"
                f"error: sparse {layer2.error(o_s):.2f}, mixed {mixed:.2f}"
            )
            (image,) = ax.images
            assert_close(torch.tensor(image.get_array().data), layer2.mass[0, 0])
            assert torch.equal(torch.tensor(image.get_alpha()) == 1, mask[0, 0])

    def test_block_mass_without_a_mask_is_opaque(self, layer2):
        _, (ax,) = panels(1)
        draw_block_mass(ax, layer2.mass[0, 0], title="Title")
        assert ax.images[0].get_alpha() is None

    def test_singular_values(self):
        _, (ax,) = panels(1)
        values = {"a": torch.tensor([3.0, 2.0, 1.0]), "b": torch.tensor([1.0, 0.5])}
        draw_singular_values(ax, values, rank=2, title="Title")
        for line, (name, expected) in zip(ax.lines, values.items(), strict=False):
            assert line.get_label() == name
            assert_close(torch.tensor(line.get_ydata()), expected)
            assert list(line.get_xdata()) == list(range(1, len(expected) + 1))
        assert ax.lines[-1].get_label() == "rank 2"
        assert set(ax.lines[-1].get_xdata()) == {2}
