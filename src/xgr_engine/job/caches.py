"""Where the libraries underneath keep what they compile: a job may run without a home directory, or a read-only one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# Variable of a library -> folder below the cache directory.
_VARIABLES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
}
# Matrix products that oneDNN keeps compiled. Each new prompt length needs new ones, and its own limit of 1024 lets the
# process grow by hundreds of MB during the first hundred thousand users; a batch needs a few dozen.
_ONEDNN_PRODUCTS = "64"


def use_caches(cache_dir: str | Path | None) -> None:
    """Puts the caches of Triton, torch and CUDA below ``cache_dir``. Call it before the first kernel is compiled.

    Without ``cache_dir`` nothing changes, unless there is no home directory to write to: then a temporary directory
    serves for this run.

    Raises:
        OSError: ``cache_dir`` cannot be made.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _ONEDNN_PRODUCTS)
    if cache_dir is not None:
        root = Path(cache_dir).absolute()
        for variable, folder in _VARIABLES.items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            os.environ[variable] = str(root / folder)
        return
    if all(os.environ.get(variable) for variable in _VARIABLES) or writable_home() is not None:
        return
    root = Path(tempfile.mkdtemp(prefix="xgr-cache-"))
    for variable, folder in _VARIABLES.items():
        os.environ.setdefault(variable, str(root / folder))


def writable_home() -> Path | None:
    """The user's home directory; None if there is none, or it may not be written."""
    home = Path("~").expanduser()
    return home if home.is_dir() and os.access(home, os.W_OK) else None
