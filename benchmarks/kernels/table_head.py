"""What a table of measurements says of itself: card, driver, versions, date, commit and command."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kdtr.contract import UnsupportedError
from kdtr.engine.cuda_modules import import_cupy

WHAT_FELL_SHORT = (
    "What fell short, why, and what was tried: [cuda-speed.md](../../docs/cuda-speed.md)."
)


def measured_by(script: str) -> Iterator[str]:
    """Markdown lines; the command is `script`, beside this file, with this process's arguments."""
    card = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    commit = output_of("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    where = card.splitlines()[0].replace(", ", ", driver ") if card else "card unknown"
    yield f"{where}. {versions()}."
    yield f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, commit {commit or 'unknown'}. Command:"
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    yield f"`{' '.join([f'python benchmarks/kernels/{script}', *words])}`."


def cupy_or_exit() -> Any:
    """CuPy; without it, or without a device, the process ends with the reason, and 1."""
    try:
        return import_cupy()
    except UnsupportedError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for names in (
        ("cupy-cuda13x", "cupy-cuda12x"),
        ("torch",),
        ("triton",),
        ("flashinfer-python",),
    ):
        for name in names:
            try:
                found.append(f"{name} {version(name)}")
            except PackageNotFoundError:
                continue
    return ", ".join(found)


def output_of(*command: str) -> str:
    """Empty where the command is not there, or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
