"""Talks to callgrind from within: counting starts and stops at a call, not at the program.

A client request is a sequence of instructions that does nothing on a processor and that valgrind
recognises (``valgrind.h``). It is put into memory as it is, so that neither a compiler nor a
compiled extension is needed.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import mmap
import platform
import re
import shutil
from collections.abc import Callable
from itertools import repeat
from pathlib import Path

MACHINE = "x86_64"
# mov rax, rdi; xor edx, edx; rol rdi by 3, 13, 61, 51; xchg rbx, rbx; mov rax, rdx; ret
_CODE = bytes.fromhex("4889f8 31d2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db 4889d0 c3")
_RUNNING_ON_VALGRIND = 0x1001
_CALLGRIND = ord("C") << 24 | ord("T") << 16
_ZERO, _DUMP_AT, _START, _STOP = (_CALLGRIND + number for number in (1, 3, 4, 5))
_numbers = itertools.count(1)


@functools.cache
def _request() -> Callable[[int], int]:
    """Return the function that makes a request of the address of its six words."""
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(_CODE)
    # keeps the memory alive as long as the function
    start = ctypes.c_char.from_buffer(memory)
    function = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(ctypes.addressof(start))
    function.memory = start  # type: ignore[attr-defined]
    return function


def _ask(code: int, argument: int = 0) -> int:
    words = (ctypes.c_uint64 * 6)(code, argument)
    return _request()(ctypes.addressof(words))


def command(folder: Path) -> list[str]:
    """Return what to put before a command, so that it runs under callgrind.

    :param folder: the folder for what is counted; see :func:`totals`
    """
    words = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no"]
    return [*words, f"--callgrind-out-file={folder / 'out.%p'}"]


def totals(folder: Path) -> dict[int, int]:
    """Return the instructions of each dump that :func:`measure` has had made, by its number."""
    found: dict[int, int] = {}
    for path in folder.glob("out.*"):
        text = path.read_text(encoding="utf-8", errors="replace")
        trigger = re.search(r"^desc: Trigger: Client Request: (\d+)$", text, re.MULTILINE)
        summary = re.search(r"^summary: (\d+)", text, re.MULTILINE)
        if trigger and summary:
            found[int(trigger[1])] = int(summary[1])
    return found


def absent() -> str:
    """Return the reason why instructions cannot be counted on this machine; empty if they can."""
    if platform.machine() != MACHINE:
        return f"instructions are counted on {MACHINE} only"
    return "" if shutil.which("valgrind") else "valgrind is not installed: apt install valgrind"


def running() -> bool:
    """Return whether this process runs under valgrind."""
    return platform.machine() == MACHINE and bool(_ask(_RUNNING_ON_VALGRIND))


def measure(step: Callable[[], object], calls: int, rounds: int) -> list[int]:
    """Have callgrind count the instructions of so many calls, several times over.

    :returns: the numbers of its dumps, one of each round
    :raises RuntimeError: this process does not run under valgrind
    """
    if not running():
        raise RuntimeError("not under valgrind")
    numbers = [next(_numbers) for _ in range(rounds)]
    # so many again before: the interpreter adapts its code to what it sees
    for _ in repeat(None, calls):
        step()
    gc.collect()
    gc.disable()
    try:
        for number in numbers:
            name = ctypes.create_string_buffer(str(number).encode())
            turns = repeat(None, calls)
            _ask(_START)
            _ask(_ZERO)
            for _ in turns:
                step()
            _ask(_DUMP_AT, ctypes.addressof(name))
            _ask(_STOP)
    finally:
        gc.enable()
    return numbers
