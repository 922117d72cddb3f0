"""Files that Python packages ship with them, found without importing the package."""

from importlib import metadata
from pathlib import Path


def packaged_file(distribution: str, name: str) -> Path:
    """Return the path of a file such as "package/data/file.csv" of an installed distribution.

    Raises:
        FileNotFoundError: it isn't there; the text says what to install.
    """
    asked = f"{distribution}: expected to be installed with its file {name}"
    try:
        path = Path(metadata.distribution(distribution).locate_file(name))
    except metadata.PackageNotFoundError:
        raise FileNotFoundError(f"{asked}, found no such package: pip install './lab[video]'") from None
    if not path.exists():
        raise FileNotFoundError(f"{asked}, found none at {path}")
    return path
