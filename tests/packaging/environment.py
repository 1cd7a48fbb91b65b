"""An environment of one's own with a wheel and what it declares to need, and nothing else.

What it needs is linked from the environment that runs the tests: the same versions, no network, and
a package that was forgotten in the declaration is missing there as it would be for a user.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["Environment", "build_wheel", "make_environment"]

ROOT = Path(__file__).parents[2]
_LONG_S = 120


def build_wheel(into: Path) -> Path:
    """The wheel of this checkout."""
    _run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(into))
    [wheel] = into.glob("*.whl")
    return wheel


class Environment:
    """A virtual environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.python = self.bin / "python"

    @property
    def packages(self) -> Path:
        """Where its packages are."""
        scheme = {"base": str(self.folder), "platbase": str(self.folder)}
        return Path(sysconfig.get_path("purelib", scheme="venv", vars=scheme))

    @property
    def environ(self) -> dict[str, str]:
        """As after a log-in: nothing of ours, and its commands on the path."""
        ours = ("STANCHION_", "PYTHON", "COV_")
        theirs = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return theirs | {"PATH": f"{self.bin}:{os.environ['PATH']}"}

    def run(self, *command: str, code: int = 0) -> str:
        """What a command of this environment says on both streams; it ends with ``code``."""
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LONG_S,
            check=False,
        )
        assert done.returncode == code, f"{command}\n{done.stdout}"
        return done.stdout


def make_environment(folder: Path, wheel: Path, *extras: str) -> Environment:
    """Install a wheel with some of its extras."""
    venv.create(folder, with_pip=False, symlinks=True)
    made = Environment(folder)
    pip = (sys.executable, "-m", "pip", "--python", str(made.python), "--isolated")
    quiet = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile")
    _run(*pip, "install", *quiet, str(wheel))
    [installed] = distributions(path=[str(made.packages)])
    for needed in _needs(installed, extras, {}).values():
        _link(needed, made.packages)
    return made


def _needs(
    of: Distribution, extras: tuple[str, ...], found: dict[str, Distribution]
) -> dict[str, Distribution]:
    """Everything that is needed, by name; what needs each other is found once."""
    for line in of.requires or ():
        need = Requirement(line)
        wanted = need.marker is None or any(
            need.marker.evaluate({"extra": extra}) for extra in (*extras, "")
        )
        name = canonicalize_name(need.name)
        if wanted and name not in found:
            found[name] = distribution(need.name)
            assert need.specifier.contains(found[name].version), line
            _needs(found[name], tuple(need.extras), found)
    return found


def _link(needed: Distribution, packages: Path) -> None:
    for top in {file.parts[0] for file in needed.files or ()} - {"..", "__pycache__"}:
        link = packages / top
        if not link.exists():
            link.symlink_to(Path(str(needed.locate_file(top))))


def _run(*command: str) -> None:
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=_LONG_S, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
