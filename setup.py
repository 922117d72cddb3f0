"""What pyproject.toml can't say: the wheel holds the records, which lie beside the packages in the repository."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

RECORDED = Path(__file__).parent / "notebooks" / "recorded"


class BuildWithRecords(build_py):
    """An editable install reads them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, copy in self.records().items():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy)

    def records(self) -> dict[Path, Path]:
        """Where each record is, and where it goes."""
        found = sorted(path for path in RECORDED.iterdir() if path.suffix in (".json", ".safetensors"))
        return {path: Path(self.build_lib, "sage_ref", "recorded", path.name) for path in found}

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, *map(str, self.records().values())]


setup(cmdclass={"build_py": BuildWithRecords})
