"""The counts of one process: a row of unsigned 64-bit numbers that other processes may read.

A count is an addition in mapped memory: no call, no lock, no system call. Two threads of a process
that count at the same instant may count one; nothing but statistics goes by these numbers.

Where a row lies is for those who count. The workers of a token cache are one user's and share a
file, in which the counts of those that ended are kept. The heartbeat has a file for each process,
since services of several users run on one machine and none may write what another reads.
"""

from __future__ import annotations


class CounterRow:
    """A row of counts.

    :param length: number of counts; they are in this process's memory until ``row`` is replaced by
        a part of a mapped file
    """

    __slots__ = ("__weakref__", "row")

    #: The counts: ``row[HITS] += 1``, which raises ``ValueError`` in a damaged file.
    row: memoryview[int]

    def __init__(self, length: int) -> None:
        self.row = words_in_memory(length)

    def count(self, place: int) -> None:
        """Count one; in a damaged file, none."""
        try:
            self.row[place] += 1
        except ValueError:  # somebody wrote a number into it that no count gets to
            self.repair()

    def repair(self) -> None:
        """Count from nothing: of a damaged row nothing is true."""
        for place in range(len(self.row)):
            self.row[place] = 0


def words_in_memory(length: int) -> memoryview[int]:
    """Return ``length`` unsigned 64-bit numbers, all 0, in this process's memory."""
    return memoryview(bytearray(length * 8)).cast("Q")
