"""docs/doctor.md lists every code, as the registry has it."""

from __future__ import annotations

from pathlib import Path

from keyfront.gateway.doctor import documents
from keyfront.gateway.doctor.checks.versions import advisories
from keyfront.gateway.doctor.registry import CHECKS

_DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "doctor.md"


def test_the_document_is_as_it_is_made() -> None:
    text = _DOCUMENT.read_text(encoding="utf-8")
    hint = "run python -m keyfront.gateway.doctor.documents docs/doctor.md"
    assert documents.replaced(text) == text, hint
    for code in CHECKS:
        assert f"\n### {code}\n" in text


def test_advisories_are_dated_and_have_sources() -> None:
    known = advisories()
    assert known["date"] >= "2026-11-23"
    for one in known["advisories"]:
        assert one["source"].startswith("https://")
        assert one["project"] in ("keystone", "keystonemiddleware")
        for first, fixed in one["ranges"]:
            assert [int(x) for x in first.split(".")] < [int(x) for x in fixed.split(".")]
