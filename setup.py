"""Packaging; everything but files from beside the package is declared in setup.cfg."""

from collections.abc import Sequence
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

# What a checkout has beside the package. Runs leave folders there whose names begin with a dot or are these.
FOLDERS, FILES = ("bench", "docs", "tests"), ("CHANGELOG.md", "ruff.toml")
LEFTOVERS = {"__pycache__", "_build", "out"}


class CompleteSdist(sdist):
    """Make a source distribution whose tests and benchmarks run as they do in a checkout."""

    def make_release_tree(self, base_dir: str, files: Sequence[str]) -> None:
        """Copy the package's files, and those beside it."""
        beside = [path for folder in FOLDERS for path in Path(folder).rglob("*") if path.is_file()]
        kept = [path for path in beside if not any(part in LEFTOVERS or part[0] == "." for part in path.parts)]
        super().make_release_tree(base_dir, sorted({*files, *FILES, *map(str, kept)}))


class BuildWithTroubleshooting(build_py):
    """Build the package with the page that `simplegraph explain` prints, which a checkout has in `docs` alone."""

    def run(self) -> None:
        """Copy the package's files, and the page; an editable install reads that where it is."""
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib) / "simplegraph" / "doctor"
            self.copy_file("docs/troubleshooting.md", str(folder / "troubleshooting.md"))


setup(cmdclass={"sdist": CompleteSdist, "build_py": BuildWithTroubleshooting})
