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
        built = Path(self.build_lib) / "simplegraph"
        if not self.editable_mode:
            _remove_stale(built)
        super().run()
        if not self.editable_mode:
            self.copy_file("docs/troubleshooting.md", str(built / "doctor" / "troubleshooting.md"))


def _remove_stale(built: Path) -> None:
    """Delete what an earlier build left and the package no longer has: setuptools would put it into the wheel."""
    for path in built.rglob("*"):
        if path.is_file() and not Path("simplegraph", path.relative_to(built)).exists():
            path.unlink()


setup(cmdclass={"sdist": CompleteSdist, "build_py": BuildWithTroubleshooting})
