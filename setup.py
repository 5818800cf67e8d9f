"""Where keyfront's packages lie, what they need, and what they are called once installed.

Each folder at the top of the repository becomes a package inside ``keyfront``: ``gateway/`` is
``keyfront.gateway``, and so on. ``src/keyfront`` is the package they hang from.
"""

import gzip
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).parent
TREES = ("gateway", "middleware", "deploy", "benchmarks")

# Every requirement carries its reason on its own line; tests/unit/test_packaging.py checks it.
BASE = [
    "Jinja2>=3.1",  # fills in the server configuration templates in deploy/
    "PasteDeploy>=3.0",  # loads applications and filters from paste .ini files
]

EXTRAS = {
    "uwsgi": [
        "uwsgi>=2.0.27",  # the server, compiled here; 2.0.27 is the first that knows Python 3.13
    ],
    "pyuwsgi": [
        "pyuwsgi>=2.0.27",  # the same server as a ready wheel, for hosts without a compiler
    ],
    "gevent": [
        "gevent>=24.2",  # uWSGI's greenlet workers
    ],
    # As the metadata spell it: pip before 23.1, Debian 12's, knows no other spelling.
    "mod-wsgi": [
        "mod_wsgi>=6.0.5",  # the Apache module, compiled here against apache2-dev
    ],
    "ldap": [
        "ldap3>=2.9",  # the LDAP client in pure Python, for what our own encoder does not do
        "python-ldap>=3.4",  # Keystone's LDAP driver, which ours extends, imports it
        "ldappool>=3.0",  # and this too, though ours pools without it
    ],
    "srv": [
        "dnspython>=2.4",  # asks DNS for the servers of ldap+srv://; Python itself knows no SRV
    ],
    "gssapi": [
        "gssapi>=1.8",  # binds the LDAP service by Kerberos, with MIT's libraries; compiled here
    ],
    "ldap3": [
        "ldap3>=2.9",  # the library and the ldap_auth filter alone: nothing to compile
    ],
    "redis": [
        "redis[hiredis]>=5.0",  # epochs shared by several hosts; hiredis parses replies in C
    ],
    "metrics": [
        "prometheus_client>=0.20",  # the text formats of Prometheus, for keyfront metrics
    ],
    "otel": [
        "opentelemetry-api>=1.30",  # spans and the trace context of W3C, for KEYFRONT_TRACES
        "opentelemetry-sdk>=1.30",  # samples, batches and queues them
        "opentelemetry-exporter-otlp-proto-http>=1.30",  # sends them to a collector
    ],
    "top": [
        "rich>=13",  # lays out, colours and shows the screen of keyfront top
    ],
    "keystone": [
        "keystone>=27",  # the service this package fronts; 27 is 2025.1
    ],
    "doctor": [
        "crossplane>=0.5.8",  # reads nginx's configuration, with the lines
        "oslo.config>=9",  # reads keystone.conf as Keystone does; Keystone brings it
        "PyYAML>=6",  # reads uWSGI's files in YAML; Keystone brings it
        "cryptography>=42",  # tells when certificates end; Keystone brings it
    ],
    "bench": [
        "pytest>=8",  # the benchmark gate is a pytest plugin
        "pytest-benchmark>=5",  # times the micro-benchmarks
    ],
    "experiments": [
        "matplotlib>=3.8",  # draws the figures of the report; the page itself needs nothing
        "trustme>=1.2",  # makes the certificates of servers with TLS
        "eventlet",  # patches the service that apache-mpm compares
        "gevent>=24.2",  # uWSGI's greenlet workers
        "keystone>=30",  # the service under load
        "ldappool>=3.0",  # what the LDAP pool is compared with; Keystone's driver imports it
        "ldap3>=2.9",  # the LDAP client of keyfront's driver
        "mod_wsgi>=6.0.5",  # the Apache side of the comparisons
        "oslo.messaging",  # the AMQP connections of apache-mpm
        "PyMySQL>=1.1",  # Keystone on MariaDB, as published
        "python-ldap>=3.4",  # Keystone's own LDAP driver
        "uwsgi>=2.0.27",  # never beside pyuwsgi: both install bin/uwsgi
    ],
    "test": [
        "cryptography>=42",  # encrypts keys of the TLS tests; Keystone and trustme bring it anyway
        "crossplane>=0.5.8",  # reads nginx's configuration for keyfront doctor
        "amqp>=5",  # the AMQP client that the heartbeat keeps alive
        "dnspython>=2.4",  # a DNS server for the tests of SRV records; eventlet brings it anyway
        "eventlet",  # the LDAP pool and the heartbeat are tested under its green threads, too
        "fixtures",  # set up Keystone's own LDAP tests, which are run with our driver
        "freezegun",  # sets the clock that those go by
        "matplotlib>=3.8",  # draws the figures of the report
        "lxml",  # compares the XML that those look at
        "oslotest",  # has the base class of those
        "testtools",  # runs them and says how they went
        "WebTest",  # sends the requests of those without a server
        "gevent>=24.2",  # the greenlet workers are tested for real
        "keystone>=27",  # the service under test; tests/series pins the others than the newest
        "grafana-foundation-sdk",  # Grafana's own types, which read the dashboard
        "gunicorn",  # one more server, with a command line that Keystone would choke on
        "hypothesis>=6.100",  # tries the epoch protocol in every order
        "kombu>=5",  # what oslo.messaging uses of it; the heartbeat covers its own pools, too
        "keystoneauth1",  # a real client session against the served Keystone
        "opentelemetry-api>=1.30",  # the spans of KEYFRONT_TRACES
        "opentelemetry-sdk>=1.30",  # samples, batches and queues them
        "opentelemetry-exporter-otlp-proto-http>=1.30",  # and with it opentelemetry-proto, to read
        "openstacksdk",  # reads clouds.yaml for keyfront check
        "ldap3>=2.9",  # the directory tests compare our encoder with its own
        "ldappool>=3.0",  # what the LDAP pool is compared with; Keystone's driver imports it
        "mod_wsgi>=6.0.5",  # the Apache side is tested for real
        "glance",  # a second service with a paste file of its own: nothing may be Keystone-only
        "openstack-placement",  # a service without a paste file, under authtoken
        "oslo.messaging",  # its publishers, callers and listeners under the heartbeat
        "psutil",  # looks at the workers' processes, memory and sockets
        "psycopg2-binary>=2.9.10",  # Keystone on PostgreSQL; the first with wheels for Python 3.13
        "prometheus_client>=0.20",  # the text formats of Prometheus
        "pymemcache",  # the memcached client of oslo.cache that has to be closed after a fork
        "PyMySQL>=1.1",  # Keystone on MariaDB, with the driver that OpenStack's documents name
        "pytest>=8",  # runs the tests
        "pytest-benchmark>=5",  # the tests of the benchmark gate
        "pytest-cov",  # measures which lines the tests reach
        "python-ldap>=3.4",  # Keystone's LDAP driver, and the directory fixture's own client
        "python-openstackclient",  # the command an operator would type
        "python-memcached",  # the other such client, thread-local
        "redis[hiredis]>=5.0",  # the Redis coordinator's client
        "requests",  # plain HTTP against the running servers
        "requests-mock",  # keystonemiddleware's own tests, which are run with our middleware
        "rich>=13",  # the screen of keyfront top
        "setuptools>=77",  # the packaging tests build without an isolated environment
        "trustme>=1.2",  # makes the certificates of the TLS tests
        "uwsgi>=2.0.27",  # never beside pyuwsgi: both install bin/uwsgi
    ],
}

ENTRY_POINTS = {
    "console_scripts": [
        "keyfront = keyfront.__main__:main",
    ],
    "paste.app_factory": [
        "authtoken = keyfront.middleware.tokens.authtoken:app_factory",
        "keystone = keyfront.gateway.keystone.application:app_factory",
    ],
    "keystone.identity": [
        "keyfront_ldap = keyfront.middleware.ldap.keystone.driver:Identity",
    ],
    "paste.filter_factory": [
        "authtoken = keyfront.middleware.tokens.authtoken:filter_factory",
        "heartbeat = keyfront.gateway.heartbeat.installation:filter_factory",
        "ldap_auth = keyfront.middleware.ldap.wsgi:filter_factory",
        "token_cache = keyfront.middleware.tokens.cache:filter_factory",
    ],
    "pytest11": [
        "keyfront_gate = keyfront.benchmarks.gate.plugin",
    ],
    "sqlalchemy.plugins": [
        "keyfront = keyfront.gateway.keystone.sqlite:Plugin",
    ],
    "oslo.config.opts": [
        "keyfront = keyfront.options:list_opts",
    ],
}


class CleanBuild(build_py):
    """Build from nothing, so that a module deleted here cannot linger in the next wheel."""

    def run(self):
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


def release_date():
    """Return the seconds of SOURCE_DATE_EPOCH, by default those of the commit or of PKG-INFO.

    A source archive's PKG-INFO has the date of the archive, so that a wheel that is built from it
    is the one that was built beside it.
    """
    told = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not told and (HERE / ".git").exists():
        command = ["git", "log", "-1", "--format=%ct"]
        try:
            asked = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
            told = asked.stdout.strip()
        except OSError:  # no git: the dates are those of the files
            pass
    if not told and (HERE / "PKG-INFO").exists():
        told = str(int((HERE / "PKG-INFO").stat().st_mtime))
    return int(told) if told else None


def usual_mode(mode):
    """Return what a checkout under the umask 022 has, whoever builds."""
    return 0o755 if mode & 0o100 else 0o644


class SameWheel(bdist_wheel):
    """A wheel whose bytes do not go by the builder's umask and clock."""

    def write_wheelfile(self, wheelfile_base, **options):
        super().write_wheelfile(wheelfile_base, **options)
        # Called last before the files are packed; for an editable install nothing is.
        if self.bdist_dir and Path(wheelfile_base).is_relative_to(self.bdist_dir):
            for path in Path(self.bdist_dir).rglob("*"):
                if path.is_file():
                    path.chmod(usual_mode(path.stat().st_mode))

    def run(self):
        date = release_date()
        if date is not None:
            os.environ["SOURCE_DATE_EPOCH"] = str(date)  # WheelFile reads it
        super().run()


class SameArchive(sdist):
    """A source archive whose bytes do not go by the builder's name, umask, folder and clock."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, **options):
        date = release_date()
        if format != "gztar" or date is None:
            return super().make_archive(base_name, format, root_dir, base_dir, **options)

        def usual(member):
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = date
            member.mode = 0o755 if member.isdir() else usual_mode(member.mode)
            return member

        name = f"{base_name}.tar.gz"
        # Its own name and time would stand in the header of gzip.
        with (
            open(name, "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=date) as packed,
            tarfile.open(
                fileobj=packed, mode="w", format=tarfile.PAX_FORMAT, dereference=True
            ) as archive,
        ):
            archive.add(base_dir, filter=usual)  # a folder's names are sorted
        return name


def version():
    text = (HERE / "src/keyfront/__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)[1]


def trees():
    return find_packages(include=[name for tree in TREES for name in (tree, f"{tree}.*")])


setup(
    name="keyfront",
    version=version(),
    description="Makes OpenStack Keystone fast, steady and honest behind uWSGI and mod_wsgi",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="keyfront contributors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["openstack", "keystone", "wsgi", "uwsgi", "mod_wsgi", "ldap"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: OpenStack",
        "Intended Audience :: System Administrators",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Internet :: WWW/HTTP :: WSGI",
        "Topic :: System :: Systems Administration :: Authentication/Directory",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=[
        *find_packages("src"),
        *(f"keyfront.{name}" for name in trees()),
    ],
    package_dir={"keyfront": "src/keyfront", **{f"keyfront.{tree}": tree for tree in TREES}},
    package_data={
        "keyfront": ["py.typed"],
        "keyfront.deploy": ["**/*"],
        "keyfront.gateway": ["doctor/*.json"],
        "keyfront.benchmarks": ["**/*.json", "load/wrk.lua", "report/page.*"],
    },
    exclude_package_data={"": ["__pycache__/*", "**/__pycache__/*", "*.pyc", "**/*.pyc"]},
    include_package_data=False,
    install_requires=BASE,
    extras_require=EXTRAS,
    entry_points=ENTRY_POINTS,
    cmdclass={"build_py": CleanBuild, "bdist_wheel": SameWheel, "sdist": SameArchive},
    zip_safe=False,
)
