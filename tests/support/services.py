"""Configurations of real services with our authtoken, for whoever runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from keyfront.benchmarks.lineups.keystone import authtoken_options

STOCK = "keystonemiddleware.auth_token:filter_factory"
OURS = "keyfront.middleware.tokens.authtoken:filter_factory"


def authtoken(url: str, password: str, more: str = "") -> str:
    """The sections of such a service in its configuration file.

    :param more: more lines of ``[keystone_authtoken]``
    """
    section = f"[keystone_authtoken]\n{authtoken_options(url, password)}{more}\n"
    return f"{section}[keyfront_authtoken]\nrevalidate = 0.1\n"


def one_line_changed(text: str) -> str:
    """A paste file in which authtoken is ours."""
    changed, count = re.subn(re.escape(STOCK), OURS, text)
    assert count == 1
    return changed


def configure_glance(folder: Path, database: str, sections: str) -> None:
    """Write glance's configuration, with its own paste file but for one line.

    :param database: the URL of a database; glance makes no tables in one that is not SQLite
    """
    own = Path(sys.prefix, "etc", "glance", "glance-api-paste.ini")
    paste = folder / "glance-api-paste.ini"
    paste.write_text(one_line_changed(own.read_text()))
    (folder / "images").mkdir()
    (folder / "glance-api.conf").write_text(
        "[DEFAULT]\nenabled_backends = files:file\n"
        "[glance_store]\ndefault_backend = files\n"
        f"[files]\nfilesystem_store_datadir = {folder / 'images'}\n"
        f"[os_glance_staging_store]\nfilesystem_store_datadir = {folder / 'staging'}\n"
        f"[os_glance_tasks_store]\nfilesystem_store_datadir = {folder / 'tasks'}\n"
        f"[database]\nconnection = {database}\n"
        f"[paste_deploy]\nconfig_file = {paste}\nflavor = keystone\n" + sections
    )


def configure_nova(folder: Path, api: str, cell0: str, cell: str, sections: str) -> None:
    """Write nova's configuration, with its own paste file but for one line, and make its tables.

    :param api: the URL of a database
    :param cell0: the URL of another, of servers that run nowhere
    :param cell: the URL of another
    """
    own = Path(sys.prefix, "etc", "nova", "api-paste.ini")
    (folder / "api-paste.ini").write_text(one_line_changed(own.read_text()))
    config = folder / "nova.conf"
    config.write_text(
        f"[DEFAULT]\nstate_path = {folder}\ntransport_url = fake:/\n"
        f"[oslo_concurrency]\nlock_path = {folder}\n"
        f"[api_database]\nconnection = {api}\n"
        f"[database]\nconnection = {cell}\n" + sections
    )
    # without cells it lists no servers, services and hosts
    for words in (
        ["api_db", "sync"],
        ["cell_v2", "map_cell0", "--database_connection", cell0],
        ["db", "sync"],
        ["cell_v2", "create_cell", "--name", "cell1"],
    ):
        manage("nova", config, *words)


def configure_neutron(folder: Path, database: str, sections: str) -> None:
    """Write neutron's configuration, with its own paste file but for one line, and make its tables.

    :param database: the URL of a database that is not SQLite, in which neutron cannot make tables
    """
    own = Path(sys.prefix, "etc", "neutron", "api-paste.ini")
    paste = folder / "api-paste.ini"
    paste.write_text(one_line_changed(own.read_text()))
    config = folder / "neutron.conf"
    config.write_text(
        f"[DEFAULT]\nstate_path = {folder}\ntransport_url = fake:/\n"
        f"api_paste_config = {paste}\ncore_plugin = ml2\n"
        f"[oslo_concurrency]\nlock_path = {folder}\n"
        "[ml2]\ntype_drivers = local\nproject_network_types = local\nmechanism_drivers =\n"
        f"[database]\nconnection = {database}\n" + sections
    )
    (folder / "plugins" / "ml2").mkdir(parents=True)
    (folder / "plugins" / "ml2" / "ml2_conf.ini").touch()
    manage("neutron-db", config, "upgrade", "head")


def manage(service: str, config: Path, *words: str) -> None:
    """Run a service's own management command."""
    program = str(Path(sys.prefix, "bin", f"{service}-manage"))
    done = subprocess.run(
        [program, "--config-file", str(config), *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout.decode(errors="replace")
