"""Run the recipes of docs/recipes with the real packages: ``python -m tests.recipes [NAME ...]``.

Each recipe has a list of wheels beside it, with versions. They are installed into a folder of the recipe's own, without
their dependencies, and come before the packages of the running Python, whose torch serves all recipes. A recipe runs in
a process of its own, and compares its answers with those of the plain model. ``--environments DIR`` keeps the folders,
so that they can be carried to a machine without a registry. ``--time`` prints how long one call takes whose answer is
waited for, and ``--json FILE`` writes that with what it was measured with.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from bench.tools.files import save_figures

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "recipes"
ONE = ROOT / "tests" / "recipes" / "one.py"
NAMES = sorted(path.stem for path in RECIPES.glob("*.py"))


def absent(name: str) -> list[str]:
    """Packages that a recipe's package imports, but does not call here; the list of wheels names them in a comment.

    Mocks stand in for those that are not installed.
    """
    text = (RECIPES / f"{name}.txt").read_text(encoding="utf-8")
    return [package for line in text.splitlines() if line.startswith("# absent: ") for package in line.split()[2:]]


def environment(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Install a recipe's wheels, unless the folder holds these very ones; returns where they are."""
    wheels = RECIPES / f"{name}.txt"
    target = folder / name
    installed = target / "installed.txt"
    if not installed.exists() or installed.read_text(encoding="utf-8") != wheels.read_text(encoding="utf-8"):
        shutil.rmtree(target, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
        subprocess.run([*pip, "-r", str(wheels)], check=True)
        shutil.copyfile(wheels, installed)
    return target


def run(name: str, target: pathlib.Path, *, timed: bool) -> dict[str, float] | None:
    """Run one recipe; returns ms of a call by what is called if `timed`, and None if the recipe failed."""
    paths = [str(ROOT), str(target), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as work:
        times = pathlib.Path(work) / "times.json"
        # By its path: some wheels bring a package "tests" of their own.
        command = [sys.executable, str(ONE), str(RECIPES / f"{name}.py"), str(times)]
        command += ["--absent", *absent(name), *(["--time"] if timed else [])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TQDM_DISABLE": "1"}
        ended = subprocess.run(command, cwd=work, env=environ)
        if ended.returncode:
            return None
        return {kind: float(ms) for kind, ms in json.loads(times.read_text(encoding="utf-8")).items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named recipes, or all; 1 if any fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.recipes", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--environments", type=pathlib.Path, metavar="DIR", help="keep the installed wheels there")
    parser.add_argument("--time", action="store_true", help="time a call of each, waited for")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write these times there")
    options = parser.parse_args(argv)
    unknown = sorted(set(options.names) - set(NAMES))
    if unknown:
        parser.error(f"no recipe is named {', '.join(unknown)}; there are {', '.join(NAMES)}")
    failed, all_times = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.environments or pathlib.Path(scratch)).resolve()
        for name in options.names or NAMES:
            started = time.perf_counter()
            times = run(name, environment(name, folder), timed=options.time or options.json is not None)
            all_times[name] = times
            save_figures(options.json, {"ms": all_times})
            if times is None:
                failed.append(name)
            said = (
                "FAILED" if times is None else ", ".join(["ok", *(f"{kind} {ms:.3f} ms" for kind, ms in times.items())])
            )
            print(f"{time.perf_counter() - started:4.0f} s  {name}: {said}", flush=True)
    ran = len(options.names or NAMES)
    print(f"{ran - len(failed)} of {ran} recipes ran, and answered as the plain model does.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
