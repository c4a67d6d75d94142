"""Environment variables -> Settings, read once. Nothing below this module reads `os.environ` for attngen's own sake.

Precedence: an argument of the call (or a flag of the command line), then the environment, then the spec (its `target`
clause), then the default.
Tuning is never an environment variable.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

#: Every variable, with what it does; `attngen doctor` and the docs print this table.
VARIABLES: dict[str, str] = {
    "ATTNGEN_CACHE_DIR": "folder of the compiled-kernel cache; default: the user's cache folder, `attngen`",
    "ATTNGEN_TARGET": "target that is compiled for, whatever the spec names, unless the call names one",
    "ATTNGEN_LOG": "log level, unless `-v` is given: debug (details), info (stages and times), warning or error",
    "ATTNGEN_DUMP_DIR": "folder that receives the generated source of every kernel that is built",
    "ATTNGEN_NO_CACHE": "1 keeps compiled kernels in a folder of the process only, removed at exit",
}
DEFAULT_TARGET = "sm_90a"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for."""

    cache_dir: Path
    target: str | None = None
    log: str | None = None
    dump_dir: Path | None = None
    use_cache: bool = True


def read(environ: Mapping[str, str]) -> Settings:
    """Settings of an environment. Raises AttnError E0501 for a value outside a variable's range."""
    from attngen.diag.diagnostic import error

    log = environ.get("ATTNGEN_LOG", "").strip().lower() or None
    if log is not None and log not in _LEVELS:
        raise error(
            "E0501",
            f"ATTNGEN_LOG is `{log}`, which is no log level",
            helps=("set it to one of debug, info, warning, error, or unset it",),
        )
    off = environ.get("ATTNGEN_NO_CACHE", "").strip().lower()
    if off not in ("", "0", "1", "true", "false", "yes", "no"):
        raise error("E0501", f"ATTNGEN_NO_CACHE is `{off}`", helps=("set it to 1 or 0, or unset it",))
    dump = environ.get("ATTNGEN_DUMP_DIR", "").strip()
    return Settings(
        cache_dir=_cache_dir(environ),
        target=environ.get("ATTNGEN_TARGET", "").strip() or None,
        log=log,
        dump_dir=Path(dump).expanduser().absolute() if dump else None,
        use_cache=off not in ("1", "true", "yes"),
    )


def _cache_dir(environ: Mapping[str, str]) -> Path:
    given = environ.get("ATTNGEN_CACHE_DIR", "").strip()
    if given:
        return Path(given).expanduser().absolute()
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("attngen", appauthor=False))


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The process's settings: the environment as it was at the first use."""
    found = read(os.environ)
    if found.log is not None:
        logger = logging.getLogger("attngen")
        if not logger.hasHandlers():  # an application's handlers, or those of `-v`, print each line once
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(_LEVELS[found.log])
    return found
