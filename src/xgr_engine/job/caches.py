"""Where the libraries beneath keep what they compile. Jobs run where there is no home directory, or a read-only one."""

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


# Products that oneDNN keeps compiled. Prompts of every length make ever new ones, and its own bound of 1024 lets the
# process grow by hundreds of MB during the first hundred thousand users; a batch needs a few dozen.
_ONEDNN_PRODUCTS = "64"


def use_caches(cache_dir: str | Path | None) -> None:
    """Sends the caches of Triton, torch and CUDA below ``cache_dir``. Call it before the first kernel is compiled.

    Without ``cache_dir`` nothing changes, unless there is no home directory to write to: then a directory of the
    system's temporary place serves for this run.

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
    if all(os.environ.get(variable) for variable in _VARIABLES) or _has_home():
        return
    root = Path(tempfile.mkdtemp(prefix="xgr-cache-"))
    for variable, folder in _VARIABLES.items():
        os.environ.setdefault(variable, str(root / folder))


def _has_home() -> bool:
    home = Path("~").expanduser()
    return home.is_dir() and os.access(home, os.W_OK)
