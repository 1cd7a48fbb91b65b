"""Configuration: the settings of one server at its start, and the place of each.

    flags  >  environment (STANCHION_…)  >  a TOML file  >  defaults

``load`` returns a ``Config``, or every fault with its place: the flag, the variable, or the line of
the file. An unknown key is a fault, not ignored. What can change while a server runs is in the
settings (``services.settings``), not here.

A key or a URL with a password can also be read from a file: STANCHION_ADMIN_KEY_FILE names one.

No other module of the server reads the environment.
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
