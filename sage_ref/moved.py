"""Importing a module by its former name raises an error that names its new place."""

import sys
from importlib.abc import MetaPathFinder

MOVED = {
    "sage_ref.arguments": "sage_ref.command_line",
    "sage_ref.ops": "sage_ref.backend, sage_ref.sagebwd.api and sage_ref.sla2.api",
    "sage_ref.plotting": "sage_ref.course.figures and sage_ref.course.hopper_model",
    "sage_ref.readme": "sage_ref.course.readme",
    "sage_ref.recorded": "sage_ref.records",
    "sage_ref.router": "sage_ref.sla2",
    "sage_ref.sla": "sage_ref.sla2",
    "sage_ref.sparse_linear": "sage_ref.sla2",
    "sage_ref.tables": "sage_ref.experiments.table1 and sage_ref.experiments.table2",
    "sage_ref.teaching": "sage_ref.course.teaching",
    "sage_ref.training.capture_video": "sage_ref.experiments.capture_video and sage_ref.training.video",
    "sage_ref.training.claims": "sage_ref.course.claims",
    "sage_ref.training.commands": "sage_ref.experiments, one file for each command",
    "sage_ref.training.grid": "sage_ref.experiments.pretrain_grid",
    "sage_ref.training.noise": "sage_ref.experiments.gradient_noise",
    "sage_ref.training.quantization_aware": "sage_ref.experiments.quantization_aware",
    "sage_ref.training.router_training": "sage_ref.experiments.router_fit",
    "sage_ref.training.speed": "sage_ref.experiments.pretrain_speed",
    "sage_ref.training.statistics": "sage_ref.course.pretraining_results",
    "sage_ref.training.structured": "sage_ref.training.video_like",
    "sage_kernels.accuracy": "sage_kernels.measure.accuracy",
    "sage_kernels.backward": "sage_kernels.sagebwd.backward",
    "sage_kernels.bench": "sage_kernels.measure.bench",
    "sage_kernels.compile": "sage_kernels.measure.compile",
    "sage_kernels.forward": "sage_kernels.sagebwd.forward",
    "sage_kernels.instructions": "sage_kernels.measure.instructions",
    "sage_kernels.ladder": "sage_kernels.sagebwd.ladder",
    "sage_kernels.launch": "sage_kernels.common.launch",
    "sage_kernels.ops": "sage_kernels.sagebwd.ops",
    "sage_kernels.profile": "sage_kernels.measure.profile",
    "sage_kernels.quantize": "sage_kernels.common.quantize",
    "sage_kernels.sla2.accuracy": "sage_kernels.measure.sla2_accuracy",
    "sage_kernels.sla2.bench": "sage_kernels.measure.sla2_bench",
    "sage_kernels.sla2.level0_as_printed": "sage_kernels.sla2.forward.level0_as_printed",
    "sage_kernels.sla2.level1_lists": "sage_kernels.sla2.forward.level1_lists",
    "sage_kernels.sla2.tuning": "sage_kernels.measure.sla2_tuning",
    "sage_kernels.tiles": "sage_kernels.common.tiles",
    "sage_kernels.tuning": "sage_kernels.measure.tuning",
}


class MovedModules(MetaPathFinder):
    """Asked first: a folder of an old checkout in which only __pycache__ is left would be found as a package."""

    def find_spec(self, name, path=None, target=None):
        if name in MOVED:
            raise ModuleNotFoundError(f"{name} has moved: it is now {MOVED[name]}", name=name)


def install() -> None:
    """Once, whatever imports it again."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
