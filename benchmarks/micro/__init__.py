"""Single operations of keyfront, each judged against its baseline: ``keyfront bench micro``.

The files are tests with the gate's fixtures (docs/gate.md), one file for each part of keyfront, and
what their counts were lies beside them. A ratio says how many times the baseline's time ours takes;
limits of ratios between different programs are wide, since those move with machine and Python.
"""
