"""What the doctor advises, done to a machine's files, and the servers' own word on the result."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

from keyfront.common.programs import apache_modules
from keyfront.gateway.doctor import advice
from keyfront.gateway.doctor.registry import Finding
from support.programs import program

_MODULES = (
    "authz_core", "authz_host", "alias", "dir", "headers", "remoteip", "proxy", "proxy_uwsgi",
    "proxy_http", "proxy_balancer", "slotmem_shm", "lbmethod_byrequests", "setenvif", "ssl",
    "socache_shmcb", "mime", "autoindex", "env", "dumpio",
)  # fmt: skip
_FOLDERS = re.compile(
    r"(?<![\w.])/(?=(?:etc/(?:nginx|apache2|httpd|haproxy)|var/log|run|var/www)[/\"])"
)


def apply(root: Path, finding: Finding) -> list[Path]:
    """Do what a finding says to the files below a root; return those that were changed."""
    edits: list[tuple[str, int, str, list[str]]] = []
    for line in finding.lines:
        mark = advice.mark(line)
        if mark is not None:
            edits.append((mark.path, mark.line, mark.how, []))
        else:
            assert edits, f"{line}: not said where it goes"
            edits[-1][3].append(line)
    for path, number, how, lines in sorted(edits, key=lambda x: (x[0], -x[1])):
        real = root / path.lstrip("/")
        texts = real.read_text(encoding="utf-8").splitlines()
        if how == "at the end of":
            texts += lines
        elif how == "instead of":
            last = number
            while _goes_on(path, texts[number - 1 : last]):
                last += 1
            texts[number - 1 : last] = lines
        elif "{" in texts[number - 1]:
            before, _, after = texts[number - 1].partition("{")
            texts[number - 1 : number] = [f"{before}{{", *lines, after]
        else:
            texts[number:number] = lines
        real.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return [root / path.lstrip("/") for path, *_ in edits]


def _goes_on(path: str, lines: list[str]) -> bool:
    """Return whether a directive goes on after some lines."""
    if "nginx" in path:
        return ";" not in lines[-1]
    return lines[-1].endswith("\\")


def refused(root: Path, paths: list[Path]) -> str:
    """Return what the server of some files says against the configuration; empty if nothing.

    The files are first made to name this machine's modules and folders, and users that are here.
    """
    of = str(paths[0])
    if "/nginx/" in of:
        return _nginx(root)
    if "/haproxy" in of:
        return _haproxy(root)
    return _apache(root)


def _rewritten(root: Path, folder: str, *changes: tuple[str, str]) -> None:
    for file in (root / "etc" / folder).rglob("*"):
        if file.is_file():
            text = _FOLDERS.sub(f"{root}/", file.read_text(encoding="utf-8"))
            for old, new in changes:
                text = re.sub(old, new, text, flags=re.MULTILINE)
            file.write_text(text, encoding="utf-8")
    for name in (f"etc/{folder}/logs", "run", "var/log/nginx", "var/log/apache2", "var/log/httpd"):
        (root / name).mkdir(parents=True, exist_ok=True)


def _run(*words: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [str(x) for x in words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    return done.stdout if done.returncode else ""


def _nginx(root: Path) -> str:
    _rewritten(root, "nginx", (r"\b(listen \S+) ssl;", r"\1;"), (r"^user .*;", ""))
    conf = root / "etc/nginx/nginx.conf"
    return _run(program("nginx", "nginx"), "-t", "-q", "-p", root, "-c", conf)


def _haproxy(root: Path) -> str:
    _rewritten(
        root, "haproxy", (r" ssl crt \S+", ""), (r"ca-file \S+", "verify none"),
        (r"^ +(user|group|chroot) .*", ""), ("verify required verify none", "verify none"),
    )  # fmt: skip
    main = root / "etc/haproxy/haproxy.cfg"
    more = [word for file in sorted(main.parent.glob("services.d/*")) for word in ("-f", file)]
    return _run(program("haproxy", "haproxy"), "-c", "-f", main, *more)


def _apache(root: Path) -> str:
    spec = importlib.util.find_spec("mod_wsgi")
    assert spec is not None
    assert spec.origin is not None
    built = next(Path(spec.origin).parent.glob("server/mod_wsgi*.so"))
    modules = apache_modules("mod_mpm_event.so", "apache2-bin")
    folder = "apache2" if (root / "etc/apache2").exists() else "httpd"
    _rewritten(
        root, folder, (r"\buser=\w+", "user=nobody"), (r"\bgroup=\w+", "group=nogroup"),
        (r"^User .*", "User nobody"), (r"^Group .*", "Group nogroup"), (r"^PidFile .*", ""),
        (r"^DefaultRuntimeDir .*", f'DefaultRuntimeDir "{root}/run"'),
        (r"^( *LoadModule mpm_(\w+)_module) .*", rf"\1 {modules}/mod_mpm_\2.so"),
        (r"^ *LoadModule (?!mpm_).*", ""),
    )  # fmt: skip
    main = (
        root / "etc" / ("apache2/apache2.conf" if folder == "apache2" else "httpd/conf/httpd.conf")
    )
    loaded = [f"LoadModule {x}_module {modules}/mod_{x}.so" for x in _MODULES]
    loaded.append(f"LoadModule wsgi_module {built}")
    text = main.read_text(encoding="utf-8")
    main.write_text("\n".join([*loaded, f"ServerName here\n{text}"]), encoding="utf-8")
    server_root = root / "etc" / folder
    return _run(
        program("apache2", "apache2-bin"), "-t", "-d", server_root, "-f", main,
        APACHE_LOG_DIR=str(root / "var/log/apache2"),
    )  # fmt: skip
