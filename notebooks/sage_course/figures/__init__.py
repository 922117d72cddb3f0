"""Figures of the notebooks and the README. A function that makes a Figure returns it; others draw on given axes."""

# ruff: noqa: F401, I001 (for notebooks to import; several names a line)
from IPython import get_ipython

from sage_course.figures.alternative_text import describe, keep_descriptions
from sage_course.figures.errors import draw_block_sizes, draw_probabilities, error_heatmap, error_map, sigma_figure
from sage_course.figures.films import IDEAS, Film
from sage_course.figures.hopper import UNIT_COLORS, busy_figure, draw_activity, prediction_figure
from sage_course.figures.ideas import ADDED, delta_film, scales_film, softmax_film, table_film
from sage_course.figures.kernels import KIND_COLORS, draw_instructions, overview_figure
from sage_course.figures.live import Board, live
from sage_course.figures.memory import memory_hierarchy
from sage_course.figures.noise import (
    VARIANT_STYLES, draw_gradients, gradients_figure, noise_figure, tokens_at_bias_figure,
)  # fmt: skip
from sage_course.figures.precision import precision_map
from sage_course.figures.pretraining import (
    MAIN_KINDS, broken_gradient_figure, gap_figure, gaps_figure, pretrain_curves_figure,
)  # fmt: skip
from sage_course.figures.sla2_flow import sla2_flow
from sage_course.figures.sla2_kernels import (
    DENSE_PEERS, SLA2_LEVEL_NAMES, dense_time, sla2_ladder_figure, sla2_paired_figure, sla2_time,
)  # fmt: skip
from sage_course.figures.slider import slider
from sage_course.figures.sparse import (
    draw_block_mass, outline_blocks, quantization_aware_figure, soft_mask_figure,
)  # fmt: skip
from sage_course.figures.style import (
    BLACK, BLUE, COLORS, GREEN, ORANGE, PURPLE, RED, SKY, TENSOR_COLORS, YELLOW, panels, show_letters, show_matrix,
)  # fmt: skip
from sage_course.figures.table1 import table1_choices_figure, table1_figure
from sage_course.figures.tile_loop import (
    backward_film, backward_order, forward_film, forward_steps, owners,
    sparse_owners,
)  # fmt: skip
from sage_course.figures.time_line import ring_film, two_warps_and_a_barrier
from sage_course.figures.video import Films, arms_figure, film_strips_figure, films_of, selected_figure
from sage_course.results.hopper_model import busy, compare_levels, level_clocks, unit_clocks

if get_ipython():
    keep_descriptions()
