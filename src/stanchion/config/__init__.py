"""Configuration: the settings of one server at its start, and where each came from.

    flags  >  environment (STANCHION_…)  >  a TOML file  >  defaults

``load`` gives a whole ``Config`` or every fault with its place: the flag, the variable, or the line
of the file. An unknown key is a fault: a setting that is written down and ignored is worse than
none. What can change while a server runs is not here, it is in the settings.

A key or a URL with a password can also be read from a file: STANCHION_ADMIN_KEY_FILE names one.

Nothing else of a server reads the environment, and this opens nothing but these files.
"""

from __future__ import annotations

from stanchion.config.addresses import is_loopback
from stanchion.config.options import OPTIONS, PREFIX, Config, Option
from stanchion.config.reading import config_file, load, secret_from

__all__ = [
    "OPTIONS",
    "PREFIX",
    "Config",
    "Option",
    "config_file",
    "is_loopback",
    "load",
    "secret_from",
]
