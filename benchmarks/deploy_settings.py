"""What ``deploy_sweep`` compares: files as the field has them, and those of ``keyfront render``.

A stock setting is made of the values that its source documents, in files as short as they allow:

    nginx        Debian 12's nginx.conf, in front of Keystone's own keystone-uwsgi-public.ini
    apache       Debian 12's event MPM and devstack's ProxyPass, in front of the same
    mod_wsgi     Debian 12's event MPM, 5 processes of one thread
    2016 ...     the five of the comparison that Rackspace published in July 2016: mod_wsgi with
                 5 processes and uWSGI with 10 x 2, both as they came; and tuned, mod_wsgi with
                 38 x 4, and uWSGI with 38 x 5 behind nginx and behind Apache
"""

from __future__ import annotations

from dataclasses import dataclass

#: The line-ups of ``keyfront render`` that take part.
OURS = {
    "keyfront nginx": "nginx+uwsgi",
    "keyfront nginx tcp": "nginx+uwsgi-tcp",
    "keyfront apache": "apache+uwsgi",
    "keyfront mod_wsgi": "mod_wsgi",
}

_NGINX = """\
user {user};
worker_processes auto;
{more}
pid {folder}/nginx.pid;
error_log {folder}/nginx.error.log;
events {{ worker_connections {connections}; }}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/body;
    uwsgi_temp_path {folder}/uwsgi;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen {listen};
        location / {{
            uwsgi_pass unix:{socket};
            uwsgi_param QUERY_STRING $query_string;
            uwsgi_param REQUEST_METHOD $request_method;
            uwsgi_param CONTENT_TYPE $content_type;
            uwsgi_param CONTENT_LENGTH $content_length;
            uwsgi_param REQUEST_URI $request_uri;
            uwsgi_param PATH_INFO $document_uri;
            uwsgi_param SERVER_PROTOCOL $server_protocol;
            uwsgi_param REMOTE_ADDR $remote_addr;
            uwsgi_param SERVER_PORT $server_port;
            uwsgi_param SERVER_NAME $server_name;
        }}
    }}
}}
"""

_UWSGI = """\
[uwsgi]
module = {module}
socket = {socket}
chmod-socket = 666
virtualenv = {virtualenv}
master = true
buffer-size = 65535
enable-threads = true
lazy-apps = true
thunder-lock = true
die-on-term = true
disable-logging = true
processes = {processes}
{more}
"""

_APACHE = """\
ServerRoot "{folder}"
DefaultRuntimeDir "{folder}"
PidFile "{folder}/apache.pid"
ServerName localhost
User {user}
Group {group}
LoadModule mpm_event_module {modules}/mod_mpm_event.so
LoadModule authz_core_module {modules}/mod_authz_core.so
Listen {listen}
ErrorLog "{folder}/apache.error.log"
LogFormat "%h %l %u %t \\"%r\\" %>s %O" common
CustomLog "{folder}/access.log" common
Timeout 300
KeepAlive On
MaxKeepAliveRequests {requests}
KeepAliveTimeout {keepalive}
StartServers 2
{limits}
{application}
<Location "/">
    Require all granted
</Location>
"""

_EVENT = """\
MinSpareThreads 25
MaxSpareThreads 75
ThreadLimit 64
ThreadsPerChild 25
MaxRequestWorkers 150
MaxConnectionsPerChild 0"""

_EVENT_2016 = """\
ServerLimit 15
ThreadLimit 64
ThreadsPerChild 35
MaxRequestWorkers 225"""

_DAEMON = """\
LoadModule wsgi_module "{mod_wsgi}"
WSGIDaemonProcess keystone processes={processes} threads={threads} python-home="{virtualenv}" \\
    display-name=%{{GROUP}}
WSGISocketPrefix {folder}/wsgi
WSGIProcessGroup keystone
WSGIApplicationGroup %{{GLOBAL}}
WSGIPassAuthorization On
WSGIScriptAlias / {folder}/app.wsgi"""

_PROXY = """\
LoadModule proxy_module {modules}/mod_proxy.so
LoadModule proxy_uwsgi_module {modules}/mod_proxy_uwsgi.so
ProxyPass "/" "unix:{socket}|uwsgi://keystone/" retry=0 acquire=1"""


@dataclass(frozen=True, kw_only=True)
class Stock:
    """One of the field's settings.

    :param front: ``nginx``, ``apache`` (in front of uWSGI) or ``mod_wsgi``
    :param processes: of the application
    :param threads: of each
    :param listen: uWSGI's queue; ``None`` for its default of 100
    :param tuned: whether the web server has the values of 2016
    """

    front: str
    processes: int
    threads: int = 1
    listen: int | None = None
    tuned: bool = False

    def files(self, values: dict[str, str], somaxconn: int) -> dict[str, str]:
        """The files' names and texts.

        :param values: ``folder``, ``listen``, ``socket``, ``user``, ``group``, ``modules``,
            ``mod_wsgi``, ``virtualenv`` and ``module``
        :param somaxconn: uWSGI does not start with a longer queue
        """
        made = {}
        if self.front != "mod_wsgi":
            more = [f"threads = {self.threads}"] if self.threads > 1 else []
            if self.listen:
                more.append(f"listen = {min(self.listen, somaxconn)}")
            made["uwsgi.ini"] = _UWSGI.format(
                **values, processes=self.processes, more="\n".join(more)
            )
        if self.front == "nginx":
            made["nginx.conf"] = _NGINX.format(
                **values,
                connections=7000 if self.tuned else 768,
                more="worker_rlimit_nofile 30000;" if self.tuned else "",
            )
            return made
        application = _DAEMON if self.front == "mod_wsgi" else _PROXY
        more_values = {"processes": self.processes, "threads": self.threads}
        made["apache.conf"] = _APACHE.format(
            **values,
            application=application.format(**values, **more_values),
            limits=_EVENT_2016 if self.tuned else _EVENT,
            requests=500 if self.tuned else 100,
            keepalive=20 if self.tuned else 5,
        )
        if self.front == "mod_wsgi":
            module, _, name = values["module"].partition(":")
            made["app.wsgi"] = f"from {module} import {name} as application\n"
        return made


STOCK = {
    "nginx": Stock(front="nginx", processes=4),
    "apache": Stock(front="apache", processes=4),
    "mod_wsgi": Stock(front="mod_wsgi", processes=5),
    "2016 mod_wsgi": Stock(front="mod_wsgi", processes=5),
    "2016 nginx": Stock(front="nginx", processes=10, threads=2),
    "2016 mod_wsgi tuned": Stock(front="mod_wsgi", processes=38, threads=4, tuned=True),
    "2016 nginx tuned": Stock(
        front="nginx", processes=38, threads=5, listen=5000, tuned=True
    ),
    "2016 apache tuned": Stock(
        front="apache", processes=38, threads=5, listen=5000, tuned=True
    ),
}
#: What each of ours must not be slower than.
RIVALS = {
    "keyfront nginx": "nginx",
    "keyfront nginx tcp": "nginx",
    "keyfront apache": "apache",
    "keyfront mod_wsgi": "mod_wsgi",
}
QUICK = ("nginx", "apache", "mod_wsgi", "keyfront nginx", "keyfront apache", "keyfront mod_wsgi")
