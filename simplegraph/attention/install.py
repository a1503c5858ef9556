"""Installs FlashAttention-3's kernels from a vLLM wheel, without vLLM.

The index's `vllm-flash-attn` is FlashAttention-2 for torch 2.4. Newer kernels come inside vLLM's own
wheels, each built for one torch version: ``python -m simplegraph install-flash-attention vllm==0.24.0``.
"""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

import torch

from simplegraph.base.errors import ConfigError

PACKAGE = "vllm_flash_attn"
_FOLDER = f"vllm/{PACKAGE}/"


def install_flash_attention(source: str, target: Path | None = None, *, force: bool = False) -> Path:
    """Install the kernels of a vLLM wheel as the package `vllm_flash_attn`.

    Args:
        source: a wheel file, or a requirement that pip downloads, such as ``"vllm==0.24.0"``.
        target: the folder to install into; the environment's site-packages by default.
        force: replace a package of that name.

    Returns:
        The package's folder.

    Raises:
        ConfigError: the wheel is built for another torch, holds no kernels or cannot be downloaded, or the package
            exists already.
    """
    target = Path(sysconfig.get_paths()["purelib"]) if target is None else target
    package = target / PACKAGE
    if package.exists() and not force:
        raise ConfigError(f"{package} exists already; remove it, or pass --force to replace it.")
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(source) if source.endswith(".whl") else _download(source, Path(folder))
        if not wheel.is_file():
            raise ConfigError(f"{wheel} is no file; expected a vLLM wheel, or a requirement such as 'vllm==0.24.0'.")
        unpacked = Path(folder) / PACKAGE
        try:
            with zipfile.ZipFile(wheel) as archive:
                _check_torch(archive, wheel.name)
                _extract(archive, unpacked)
            target.mkdir(parents=True, exist_ok=True)
            if package.exists():
                shutil.rmtree(package)
            shutil.move(unpacked, package)  # one move: no half-installed package is left
        except (zipfile.BadZipFile, OSError) as error:
            raise ConfigError(f"{wheel.name} cannot be installed into {target}: {error}.") from error
    return package


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ConfigError(
            f"pip could not download {requirement!r}: {(done.stderr.strip() or 'no wheel').splitlines()[-1]}"
        )
    return wheels[0]


def _check_torch(archive: zipfile.ZipFile, wheel: str) -> None:
    """Refuse a wheel for another torch: its kernels would crash, or compute wrong numbers."""
    name = next((name for name in archive.namelist() if name.endswith(".dist-info/METADATA")), None)
    if name is None:
        raise ConfigError(f"{wheel} has no metadata; expected a vLLM wheel.")
    requirements = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    needed = {match[1] for line in requirements if (match := re.match(r"torch\s*==\s*([\w.]+)", line))}
    installed = torch.__version__.split("+")[0]
    if needed != {installed}:
        built = f"torch {' and '.join(sorted(needed))}" if needed else "no torch version that it names"
        raise ConfigError(f"{wheel} is built for {built}, installed is {installed}; take the vLLM release for it.")


def _extract(archive: zipfile.ZipFile, package: Path) -> None:
    names = [name for name in archive.namelist() if name.startswith(_FOLDER) and not name.endswith("/")]
    if not any(name.endswith(".so") for name in names):
        raise ConfigError(f"the wheel holds no kernels under {_FOLDER}; expected a CUDA build of vLLM.")
    for name in names:
        path = package / name.removeprefix(_FOLDER)
        if not path.resolve().is_relative_to(package.resolve()):
            raise ConfigError(f"the wheel holds {name!r}, outside its own folder; do not trust this wheel.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(archive.read(name))
