"""Sets the wall clock of a program that runs, and of nothing else."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest


class SetClock:
    """The wall clock of a program that is started with it, set while that runs.

    :param folder: for the library that is made for it, see ``set_clock.c``
    """

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler; on Debian: apt-get install gcc libc6-dev")
        library, self._file = folder / "set_clock.so", folder / "clock"
        source = Path(__file__).with_suffix(".c")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source],
            check=True,
        )
        self._file.write_bytes(bytes(8))
        #: Of the program.
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_FILE": str(self._file)}

    def set(self, seconds: float) -> None:
        """Set it to so many seconds ahead of the machine's."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("=q", round(seconds * 1e6)))
