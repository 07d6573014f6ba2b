"""What this machine is, in words for a caption."""

import os
import platform
from importlib.metadata import version
from pathlib import Path


def machine_text() -> str:
    """Processor, cores, Python and JAX versions."""
    return (
        f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"JAX {version('jax')}"
    )


def processor() -> str:
    """The processor's own name where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return " ".join(value.split())
    return platform.processor() or platform.machine()
