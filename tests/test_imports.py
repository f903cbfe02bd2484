"""What a process loads when it starts, and that every package is typed and shipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
HEAVY = ("torch", "transformers", "triton", "numpy.f2py")


def loaded_after(statement: str) -> set[str]:
    """Top-level modules of a fresh interpreter that ran `statement`."""
    code = f"import sys\n{statement}\nprint('loaded:', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("loaded:"))
    return set(line.split()[1:])


@pytest.mark.parametrize(
    "module",
    [
        "engine",
        "engine.protocol",
        "engine.loader.packaged",
        "engine.loader.precheck",
        "engine.loader.sources",
        "kvstore",
        "router",
        "server",
        "server.settings",
        "server.cli.main",
        "server.launcher",
        "server.api_process",
        "server.card",
    ],
)
def test_starts_without_torch(module: str) -> None:
    loaded = loaded_after(f"import {module}")
    assert module in loaded
    assert loaded.isdisjoint(HEAVY)


def test_command_line_loads_no_server_before_it_has_read_its_arguments() -> None:
    loaded = loaded_after("import server.cli.main")
    assert loaded.isdisjoint({"fastapi", "uvicorn", "pydantic", "zmq", "tokenizers", "yaml", "numpy", "jinja2", "tqdm"})


def test_the_check_would_notice_torch() -> None:
    assert "torch" in loaded_after("import torch")


def test_every_package_is_known() -> None:
    assert {"engine", "kvstore", "router", "server"} <= set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_marked_as_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_modules_is_a_package(package: str) -> None:
    """A folder without __init__.py would be left out of wheels and of mypy's view."""
    folders = {path.parent for path in (ROOT / package).rglob("*.py")}
    assert [str(one) for one in sorted(folders) if not (one / "__init__.py").is_file()] == []
