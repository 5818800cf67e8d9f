"""The worlds of the tests: servers, certificates, fault proxies, and programs they run."""

from pathlib import Path

#: Folder of the applications that servers import: for their PYTHONPATH.
APPS = Path(__file__).parent / "apps"
