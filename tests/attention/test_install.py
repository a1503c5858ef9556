"""FlashAttention-3 out of a vLLM wheel: only where it fits the installed torch."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from simplegraph import ConfigError
from simplegraph.__main__ import main
from simplegraph.attention.install import install_flash_attention

TORCH = torch.__version__.split("+")[0]


def wheel(folder: Path, *, torch_version: str | None = TORCH, files: dict[str, str] | None = None) -> Path:
    path = folder / "vllm-9.9.9-cp38-abi3-manylinux1_x86_64.whl"
    requirement = f"Requires-Dist: torch=={torch_version}\n" if torch_version else ""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm-9.9.9.dist-info/METADATA", f"Metadata-Version: 2.1\nName: vllm\n{requirement}")
        archive.writestr("vllm/engine.py", "raise RuntimeError('not wanted')")
        for name, text in (
            files if files is not None else {"__init__.py": "FOUND = 3", "_vllm_fa3_C.abi3.so": ""}
        ).items():
            archive.writestr(f"vllm/vllm_flash_attn/{name}", text)
    return path


def test_the_kernels_become_a_package_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "site"
    package = install_flash_attention(str(wheel(tmp_path)), target)
    assert sorted(path.name for path in package.iterdir()) == ["__init__.py", "_vllm_fa3_C.abi3.so"]
    monkeypatch.syspath_prepend(target)
    assert importlib.import_module("vllm_flash_attn").FOUND == 3


@pytest.mark.parametrize(("version", "words"), [("2.4.0", f"torch 2.4.0, installed is {TORCH}"), (None, "no torch")])
def test_a_wheel_for_another_torch_is_refused(tmp_path: Path, version: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        install_flash_attention(str(wheel(tmp_path, torch_version=version)), tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_a_wheel_without_kernels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no kernels"):
        install_flash_attention(str(wheel(tmp_path, files={"__init__.py": ""})), tmp_path / "site")


def test_a_wheel_that_writes_elsewhere_is_refused(tmp_path: Path) -> None:
    files = {"../../evil.py": "", "_vllm_fa3_C.abi3.so": ""}
    with pytest.raises(ConfigError, match="outside its own folder"):
        install_flash_attention(str(wheel(tmp_path, files=files)), tmp_path / "deep" / "site")
    assert not list(tmp_path.rglob("evil.py"))


def test_what_is_there_is_kept_unless_asked(tmp_path: Path) -> None:
    source = str(wheel(tmp_path))
    package = install_flash_attention(source, tmp_path)
    (package / "mine.py").touch()
    with pytest.raises(ConfigError, match="--force"):
        install_flash_attention(source, tmp_path)
    assert (package / "mine.py").exists()
    install_flash_attention(source, tmp_path, force=True)
    assert not (package / "mine.py").exists()  # another version's files would be mixed with these


def test_what_cannot_be_unpacked_leaves_the_package_that_is_there(tmp_path: Path) -> None:
    package = install_flash_attention(str(wheel(tmp_path)), tmp_path)
    torn = tmp_path / "torn.whl"
    torn.write_bytes(wheel(tmp_path).read_bytes()[:200])
    with pytest.raises(ConfigError, match=r"torn.whl cannot be installed"):
        install_flash_attention(str(torn), tmp_path, force=True)
    assert (package / "__init__.py").exists()


def test_a_target_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be installed"):
        install_flash_attention(str(wheel(tmp_path)), tmp_path / "file")


def test_the_command_says_what_is_wrong_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["install-flash-attention", str(tmp_path / "none.whl")]) == 1
    assert "is no file" in capsys.readouterr().err
    assert main(["install-flash-attention", str(wheel(tmp_path)), "--target", str(tmp_path / "site")]) == 0
    assert str(tmp_path / "site" / "vllm_flash_attn") in capsys.readouterr().out


def test_without_numpy_the_line_to_run_is_said() -> None:
    code = "import sys; sys.modules['numpy'] = None; from simplegraph.attention import SDPABackend"
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1].endswith('needs numpy; to have it: pip install -e ".[attention]"')
    assert "ConfigError" in found.stderr.splitlines()[-1]
