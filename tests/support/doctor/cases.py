# ruff: noqa: E501 - the lines of others' files are as long as they are
"""For each check a machine that fires it and one that does not, equivalent to the field's.

Where a deployment tool really leaves the fault, its deployment of :mod:`.deployments` gets the lines
back that the tool writes.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

from keyfront.gateway.doctor.found import Told
from keyfront.gateway.doctor.machine_state import Live, Process, Queue
from keyfront.gateway.doctor.schema import Schema

from .deployments import (
    CHARM,
    CONVERGED_CLOUD,
    DEBIAN_NGINX,
    DEVSTACK,
    KOLLA,
    LDAP_GALERA,
    LOOPBACK,
    OPENSTACK_HELM,
    OSA,
    RDO_PUPPET,
)
from .machines import NOW, Machine, certificate

_CONF = "/etc/keystone/keystone.conf"
_INI = "/etc/keystone/keystone-uwsgi.ini"
_SITE = "/etc/nginx/sites-enabled/keystone"
_NGINX = "/etc/nginx/nginx.conf"
_UNIT = "/etc/systemd/system/keystone-uwsgi.service"
_BACKEND = "/etc/haproxy/services.d/keystone.cfg"
_HAPROXY = "/etc/haproxy/haproxy.cfg"
_PUPPET = "/etc/httpd/conf.d/10-keystone_wsgi.conf"
_STACK = "/etc/apache2/sites-enabled/keystone-api.conf"
_DOMAIN = "/etc/keystone/domains/keystone.corp.conf"
_HELM = "/etc/httpd/conf/httpd.conf"


def _told(machine: Machine, **values: int) -> Machine:
    return replace(machine, told=Told(**values))


def _assumed(machine: Machine, **versions: str) -> Machine:
    return replace(machine, assumed={**machine.assumed, **versions})


def _running(**values: object) -> Machine:
    return replace(LOOPBACK, live=Live(**values))  # type: ignore[arg-type]


_NODE = {
    "node": {
        "keys": {"fernet_tokens": ["0" * 16, "1" * 16]},
        "versions": {"keystone": "29.0.0"},
        "workers": {},
        "settings": {},
    }
}
# Those of the deployments' keys.
_DIGESTS = [sha256(f"key{x}".encode()).hexdigest()[:16] for x in (0, 8, 9, 10)]
_PROCESS = Process(pid=42, name="uwsgi", rss=200, files=(90, 1024), begun=NOW - 60, shm=7)


def _made(text: str, command: str = "keyfront render /etc/keyfront") -> str:
    """A file as keyfront render writes it."""
    from keyfront.gateway.render.writer import with_header

    return with_header(text, title="A file.", command=command, versions="any version")


_INI_MADE = _made("[uwsgi]\nmaster = true\n")

#: Code: the machine that fires it, the machine that does not.
CASES: dict[str, tuple[Machine, Machine]] = {
    # Across layers
    "X01": (replace(DEBIAN_NGINX, somaxconn=128), DEBIAN_NGINX),
    "X02": (DEBIAN_NGINX.swap(_INI, "listen = 1024\n", ""), DEBIAN_NGINX),
    "X03": (DEBIAN_NGINX.swap(_SITE, "        uwsgi_read_timeout 75s;\n", ""), DEBIAN_NGINX),
    "X04": (KOLLA.swap(_HAPROXY, "timeout server 95s", "timeout server 60s"), KOLLA),
    "X05": (
        DEBIAN_NGINX.swap(_INI, "worker-reload-mercy = 60", "worker-reload-mercy = 90"),
        DEBIAN_NGINX,
    ),
    "X06": (DEBIAN_NGINX.swap(_UNIT, "TimeoutStopSec=90", "TimeoutStopSec=infinity"), DEBIAN_NGINX),
    "X07": (
        _told(DEBIAN_NGINX, nodes=3, database_connections=25),
        _told(DEBIAN_NGINX, nodes=3, database_connections=151),
    ),
    "X08": (
        _told(LDAP_GALERA, nodes=3, ldap_connections=40),
        _told(LDAP_GALERA, nodes=3, ldap_connections=100),
    ),
    "X09": (DEBIAN_NGINX.swap(_INI, "threads = 2", "threads = 32"), DEBIAN_NGINX),
    "X10": (DEBIAN_NGINX.swap(_UNIT, "MemoryMax=2G", "MemoryMax=256M"), DEBIAN_NGINX),
    "X11": (
        OPENSTACK_HELM.swap(
            _HELM,
            "mpm_event_module modules/mod_mpm_event.so",
            "mpm_prefork_module modules/mod_mpm_prefork.so",
        ).put(
            "/var/www/cgi-bin/keystone/keystone-wsgi-public",
            "import eventlet\neventlet.monkey_patch()\n",
        ),
        OPENSTACK_HELM,
    ),
    "X12": (DEBIAN_NGINX.swap(_NGINX, "worker_rlimit_nofile 16384;\n", ""), DEBIAN_NGINX),
    "X13": (
        DEBIAN_NGINX.swap(_SITE, "/run/uwsgi/keystone.sock", "/run/uwsgi/keystone-public.sock"),
        DEBIAN_NGINX,
    ),
    "X14": (
        DEBIAN_NGINX.swap(
            _INI,
            "socket = /run/uwsgi/keystone.sock\nchmod-socket = 660",
            "http-socket = /run/uwsgi/keystone.sock\nchmod-socket = 660",
        ),
        DEBIAN_NGINX,
    ),
    "X15": (
        KOLLA.swap(_CONF, "public_endpoint = https://cloud.example.org:5000\n", "").swap(
            _CONF, "enable_proxy_headers_parsing = true", ""
        ),
        KOLLA,
    ),
    "X16": (
        KOLLA.swap(_HAPROXY, "    timeout check 10s\n", "").swap(_BACKEND, "fall 5", "fall 3"),
        KOLLA,
    ),
    "X17": (
        _told(KOLLA, nodes=100, memcached_connections=512),
        _told(KOLLA, nodes=3, memcached_connections=1024),
    ),
    "X18": (
        DEBIAN_NGINX.swap(_NGINX, "client_max_body_size 114688", "client_max_body_size 0"),
        DEBIAN_NGINX,
    ),
    "X19": (DEBIAN_NGINX.swap(_INI, "threads = 2", "threads = 8"), DEBIAN_NGINX),
    "X20": (
        DEVSTACK.swap(
            "/etc/apache2/mods-enabled/mpm_event.conf",
            "MaxRequestWorkers 400",
            "MaxRequestWorkers 10",
        ),
        DEVSTACK,
    ),
    "X21": (
        DEBIAN_NGINX.append(_INI, "http-socket = 0.0.0.0:35357\n"),
        DEBIAN_NGINX.append(_INI, "http-socket = 127.0.0.1:35357\n"),
    ),
    "X22": (DEBIAN_NGINX.swap(_INI, "buffer-size = 65535", "buffer-size = 8192"), DEBIAN_NGINX),
    "X23": (
        CONVERGED_CLOUD.append(
            "/etc/keystone/uwsgi-keystone.ini", "route-user-agent = ^kube-probe donotlog:\n"
        ),
        CONVERGED_CLOUD.append(
            "/etc/keystone/uwsgi-keystone.ini", "route-user-agent = ^monitoring donotlog:\n"
        ),
    ),
    # uWSGI
    "U01": (
        CONVERGED_CLOUD.swap("/etc/keystone/uwsgi-keystone.ini", "65535", "114688"),
        CONVERGED_CLOUD,
    ),
    "U02": (
        DEBIAN_NGINX.swap(_INI, "die-on-term = true\n", "").swap(
            _INI, "hook-master-start = unix_signal:15 gracefully_kill_them_all\n", ""
        ),
        DEBIAN_NGINX,
    ),
    "U03": (
        OSA.swap(
            "/etc/uwsgi/keystone-wsgi-public.ini",
            "hook-master-start = unix_signal:15 gracefully_kill_them_all\n",
            "",
        ),
        OSA,
    ),
    "U04": (
        CONVERGED_CLOUD.swap(
            "/etc/keystone/uwsgi-keystone.ini",
            "unix_signal:15 gracefully",
            "unix_signal:15\t# gracefully",
        ),
        CONVERGED_CLOUD,
    ),
    "U05": (KOLLA.swap(_INI, "harakiri = 60\n", ""), KOLLA),
    "U06": (_assumed(DEBIAN_NGINX, uwsgi="2.0.26"), DEBIAN_NGINX),
    "U07": (KOLLA.swap(_INI, "http-socket = 192.0.2.21:5000", "http = 192.0.2.21:5000"), KOLLA),
    "U08": (
        _assumed(DEBIAN_NGINX, uwsgi="2.0.21")
        .swap(_INI, "enable-threads = true\n", "")
        .swap(_INI, "threads = 2\n", ""),
        _assumed(DEBIAN_NGINX, uwsgi="2.0.21").swap(_INI, "threads = 2\n", ""),
    ),
    "U09": (
        DEBIAN_NGINX.swap(_INI, "lazy-apps = true\n", ""),
        DEBIAN_NGINX.swap(_INI, "lazy-apps = true\n", "").swap(
            _INI, "module = keystone.wsgi.api", "module = keyfront.gateway.uwsgi"
        ),
    ),
    "U10": (KOLLA.swap(_INI, "strict = true\n", ""), KOLLA),
    "U11": (
        DEVSTACK.append("/etc/keystone/keystone-api-uwsgi.ini", "start-time = %t\n"),
        DEVSTACK.append("/etc/keystone/keystone-api-uwsgi.ini", "set-ph = start-time=%t\n"),
    ),
    "U12": (
        KOLLA.append(_INI, "stats = 0.0.0.0:1717\nstats-http = true\n"),
        KOLLA.append(_INI, "stats = 0.0.0.0:1717\nstats-http = true\nstats-no-cores = true\n"),
    ),
    "U13": (
        OSA.swap("/etc/uwsgi/keystone-wsgi-public.ini", "127.0.0.1:35358", "0.0.0.0:35358"),
        OSA,
    ),
    "U14": (
        DEVSTACK.swap(
            "/etc/keystone/keystone-api-uwsgi.ini", "chmod-socket = 660", "chmod-socket = 666"
        ),
        DEVSTACK,
    ),
    "U15": (KOLLA.swap(_INI, "need-app = true\n", ""), KOLLA),
    "U16": (
        CONVERGED_CLOUD.swap("/etc/keystone/uwsgi-keystone.ini", "master = true", "master = false"),
        CONVERGED_CLOUD,
    ),
    "U17": (DEBIAN_NGINX.swap(_INI, "max-requests-delta = 500\n", ""), DEBIAN_NGINX),
    "U18": (
        DEBIAN_NGINX.swap(_INI, "max-requests = 10000\nmax-requests-delta = 500\n", ""),
        DEBIAN_NGINX,
    ),
    "U19": (
        DEBIAN_NGINX.append(_INI, "cheaper = 2\ncheaper-algo = backlog\n"),
        DEBIAN_NGINX.append(_INI, "cheaper = 2\ncheaper-algo = busyness\n"),
    ),
    "U20": (
        _assumed(KOLLA, keystone="28.0.2").swap(
            _INI,
            "module = keystone.wsgi.api:application",
            "wsgi-file = /usr/bin/keystone-wsgi-public",
        ),
        _assumed(KOLLA, keystone="27.0.2")
        .put("/usr/bin/keystone-wsgi-public", "")
        .swap(
            _INI,
            "module = keystone.wsgi.api:application",
            "wsgi-file = /usr/bin/keystone-wsgi-public",
        ),
    ),
    "U21": (
        DEBIAN_NGINX.swap(
            _UNIT,
            "/usr/bin/uwsgi --ini /etc/keystone/keystone-uwsgi.ini",
            "/usr/bin/gunicorn -w 4 keystone.wsgi.api:application",
        ),
        DEBIAN_NGINX.swap(
            _UNIT,
            "/usr/bin/uwsgi --ini /etc/keystone/keystone-uwsgi.ini",
            "/usr/bin/gunicorn -w 4 keyfront.gateway.wsgi:application",
        ),
    ),
    "U22": (
        replace(LOOPBACK, features={"uwsgi": frozenset({"http-socket"})}).append(
            _INI, "route-user-agent = ^kube-probe donotlog:\n"
        ),
        replace(LOOPBACK, features={"uwsgi": frozenset({"route-user-agent"})}).append(
            _INI, "route-user-agent = ^kube-probe donotlog:\n"
        ),
    ),
    "U23": (
        KOLLA.swap(_INI, "disable-logging = true\n", ""),
        KOLLA.swap(_INI, "disable-logging = true", "log-x-forwarded-for = true"),
    ),
    "U24": (
        OSA.swap("/etc/uwsgi/keystone-wsgi-public.ini", "keystone-31.0.0", "keystone-30.0.0"),
        OSA,
    ),
    "U25": (
        KOLLA.swap(_INI, "processes = 4\n", "").swap(_INI, "threads = 2\n", ""),
        KOLLA,
    ),
    "U26": (DEBIAN_NGINX.swap(_INI, "vacuum = true\n", ""), DEBIAN_NGINX),
    "U27": (DEBIAN_NGINX.swap(_INI, "single-interpreter = true\n", ""), DEBIAN_NGINX),
    "U28": (
        DEBIAN_NGINX.append(_INI, "thunder-lock = true\nmap-socket = 0:1\n"),
        DEBIAN_NGINX.append(_INI, "thunder-lock = false\nmap-socket = 0:1\n"),
    ),
    # nginx
    "N01": (
        DEBIAN_NGINX.swap(_NGINX, "worker_connections 4096", "worker_connections 768"),
        DEBIAN_NGINX,
    ),
    "N02": (
        DEBIAN_NGINX.append(_CONF, "[auth]\nmethods = password,token,openid\n").swap(
            _NGINX, "    large_client_header_buffers 4 32k;\n", ""
        ),
        DEBIAN_NGINX.append(_CONF, "[auth]\nmethods = password,token,openid\n"),
    ),
    "N03": (DEBIAN_NGINX.swap(_SITE, "        uwsgi_buffer_size 32k;\n", ""), DEBIAN_NGINX),
    "N04": (
        DEBIAN_NGINX.swap(
            _SITE,
            "uwsgi_read",
            "uwsgi_next_upstream error timeout non_idempotent;\n        uwsgi_read",
        ),
        DEBIAN_NGINX.swap(_SITE, "uwsgi_read", "uwsgi_next_upstream off;\n        uwsgi_read"),
    ),
    "N05": (
        DEBIAN_NGINX.swap(
            _SITE,
            "server {\n    listen",
            "upstream keystone {\n    server "
            "unix:/run/uwsgi/keystone.sock max_fails=3 fail_timeout=10s;\n}\nserver {\n    listen",
        ).swap(_SITE, "uwsgi_pass unix:/run/uwsgi/keystone.sock", "uwsgi_pass keystone"),
        DEBIAN_NGINX,
    ),
    "N06": (
        DEBIAN_NGINX.swap(_SITE, "        uwsgi_param HTTP_X_FORWARDED_FOR $remote_addr;\n", ""),
        DEBIAN_NGINX,
    ),
    "N07": (
        DEBIAN_NGINX.swap(_SITE, "        limit_req zone=logins burst=25 nodelay;\n", ""),
        DEBIAN_NGINX,
    ),
    "N08": (
        _assumed(DEBIAN_NGINX, nginx="1.22.1").swap(
            _SITE, "uwsgi_pass unix:/run/uwsgi/keystone.sock", "proxy_pass http://127.0.0.1:35357"
        ),
        _assumed(DEBIAN_NGINX, nginx="1.22.1"),
    ),
    "N09": (
        DEBIAN_NGINX.swap(
            _NGINX, "worker_connections 4096;", "worker_connections 4096;\n    use epoll;"
        ),
        DEBIAN_NGINX,
    ),
    "N10": (DEBIAN_NGINX.swap(_NGINX, "TLSv1.2 TLSv1.3", "TLSv1 TLSv1.1 TLSv1.2"), DEBIAN_NGINX),
    "N11": (
        DEBIAN_NGINX.swap(
            _NGINX,
            "    access_log",
            "    log_format debug '$remote_addr $http_x_auth_token';\n    access_log",
        ),
        DEBIAN_NGINX.swap(
            _NGINX,
            "    access_log",
            "    log_format timed '$remote_addr $request_time';\n    access_log",
        ),
    ),
    "N12": (
        DEBIAN_NGINX.append(_CONF, "[federation]\nremote_id_attribute = HTTP_OIDC_ISS\n"),
        DEBIAN_NGINX.append(_CONF, "[federation]\nremote_id_attribute = HTTP_OIDC_ISS\n").swap(
            _SITE,
            "        uwsgi_buffer",
            '        uwsgi_param HTTP_OIDC_ISS "";\n        uwsgi_buffer',
        ),
    ),
    # Apache
    "A19": (
        RDO_PUPPET.without("/var/www/cgi-bin/keystone/keystone"),
        RDO_PUPPET,
    ),
    "A01": (
        DEVSTACK.swap(
            "/etc/apache2/mods-enabled/mpm_event.conf", "ServerLimit 16", "ServerLimit 4"
        ),
        DEVSTACK,
    ),
    "A02": (OPENSTACK_HELM.append(_HELM, "MaxRequestsPerChild 128\n"), OPENSTACK_HELM),
    "A03": (
        RDO_PUPPET.put(
            "/etc/httpd/conf.modules.d/00-mpm.conf",
            "LoadModule mpm_prefork_module modules/mod_mpm_prefork.so\n",
        ),
        RDO_PUPPET,
    ),
    "A04": (RDO_PUPPET.swap(_PUPPET, "  WSGIApplicationGroup %{GLOBAL}\n", ""), RDO_PUPPET),
    "A05": (RDO_PUPPET.swap(_PUPPET, "  WSGIPassAuthorization On\n", ""), RDO_PUPPET),
    "A06": (
        RDO_PUPPET.swap(_PUPPET, " request-timeout=45 queue-timeout=45 graceful-timeout=30", ""),
        RDO_PUPPET,
    ),
    "A07": (RDO_PUPPET.swap(_PUPPET, "  WSGIProcessGroup keystone\n", ""), RDO_PUPPET),
    "A08": (
        OPENSTACK_HELM.swap(
            "/etc/httpd/conf.d/wsgi-keystone.conf", "processes=4 threads=1", "processes=1 threads=1"
        ),
        OPENSTACK_HELM,
    ),
    "A09": (
        CHARM.append(
            "/etc/apache2/apache2.conf", "KeepAliveTimeout 75\nMaxKeepAliveRequests 1000\n"
        ),
        CHARM.append("/etc/apache2/apache2.conf", "KeepAliveTimeout 75\nWSGISocketRotation Off\n"),
    ),
    "A10": (
        _assumed(RDO_PUPPET, mod_wsgi="6.0.2")
        .swap(_PUPPET, " queue-timeout=45", "")
        .append(_PUPPET, "WSGIScriptReloading Off\n"),
        _assumed(RDO_PUPPET, mod_wsgi="6.0.5").append(_PUPPET, "WSGIScriptReloading Off\n"),
    ),
    "A11": (
        DEVSTACK.append(
            _STACK,
            "<Proxy balancer://keystone>\n    BalancerMember uwsgi://127.0.0.1:35358\n"
            "    ProxySet forcerecovery=Off\n</Proxy>\n",
        ),
        DEVSTACK.append(
            _STACK,
            "<Proxy balancer://keystone>\n    BalancerMember uwsgi://127.0.0.1:35358 "
            "retry=0\n</Proxy>\n",
        ),
    ),
    "A12": (
        OSA.swap("/etc/apache2/sites-enabled/keystone.conf", " acquire=1 connectiontimeout=5", ""),
        OSA,
    ),
    "A13": (_assumed(DEVSTACK, apache="2.4.57"), _assumed(DEVSTACK, apache="2.4.62")),
    "A14": (
        RDO_PUPPET.append(_PUPPET, "LoadModule auth_openidc_module modules/mod_auth_openidc.so\n"),
        RDO_PUPPET.append(
            _PUPPET,
            "LoadModule auth_openidc_module modules/mod_auth_openidc.so\n"
            "LimitRequestFieldSize 16380\n",
        ),
    ),
    "A15": (
        DEVSTACK.swap(_STACK, 'RequestHeader set X-Forwarded-For "expr=%{REMOTE_ADDR}"\n', ""),
        DEVSTACK,
    ),
    "A16": (
        RDO_PUPPET.append(_PUPPET, "SSLProtocol all -SSLv3\n"),
        RDO_PUPPET.append(_PUPPET, "SSLProtocol all -SSLv3 -TLSv1 -TLSv1.1\n"),
    ),
    "A17": (
        RDO_PUPPET.append(_PUPPET, 'LogFormat "%h %{X-Auth-Token}i" debug\n'),
        RDO_PUPPET,
    ),
    "A18": (
        RDO_PUPPET.append(_CONF, "[federation]\nremote_id_attribute = HTTP_OIDC_ISS\n"),
        RDO_PUPPET.append(_CONF, "[federation]\nremote_id_attribute = HTTP_OIDC_ISS\n").append(
            _PUPPET, "RequestHeader unset OIDC-ISS early\n"
        ),
    ),
    # HAProxy
    "H01": (KOLLA.swap(_BACKEND, "    option forwardfor\n", ""), KOLLA),
    "H02": (
        KOLLA.swap(
            _HAPROXY,
            "stats socket /var/lib/kolla/haproxy/haproxy.sock mode 660 level admin",
            "stats socket ipv4@0.0.0.0:9999 level admin",
        ),
        KOLLA,
    ),
    "H03": (KOLLA.swap(_HAPROXY, "    timeout server 95s\n", ""), KOLLA),
    "H04": (
        KOLLA.append(_BACKEND, "    retry-on all-retryable-errors\n"),
        KOLLA.append(_BACKEND, "    retry-on conn-failure\n"),
    ),
    "H05": (
        KOLLA.swap(_BACKEND, "192.0.2.21:5000 check inter 2000 rise 2 fall 5", "192.0.2.21:5000"),
        KOLLA,
    ),
    "H06": (
        KOLLA.swap(_BACKEND, "192.0.2.21:5000 check", "192.0.2.21:5000 ssl verify none check"),
        KOLLA.swap(
            _BACKEND,
            "192.0.2.21:5000 check",
            "192.0.2.21:5000 ssl verify required ca-file /etc/ssl/ca.pem check",
        ),
    ),
    "H07": (
        KOLLA.append(_CONF, "[oidc_corp]\nremote_id_attribute = HTTP_OIDC_ISS\n"),
        KOLLA.append(_CONF, "[oidc_corp]\nremote_id_attribute = HTTP_OIDC_ISS\n").swap(
            _BACKEND,
            "    http-request del-header X-Forwarded-Proto\n",
            "    http-request del-header X-Forwarded-Proto\n"
            "    http-request del-header OIDC-ISS\n",
        ),
    ),
    # Keystone
    "K01": (replace(LOOPBACK, modes={"/etc/keystone/fernet-keys": 0o755}), LOOPBACK),
    "K02": (
        LOOPBACK.swap(_CONF, "max_active_keys = 5", "max_active_keys = 3").swap(
            _CONF, "expiration = 86400", "expiration = 172800"
        ),
        LOOPBACK,
    ),
    "K03": (replace(LOOPBACK, ages={"/etc/keystone/fernet-keys/10": 400 * 86400.0}), LOOPBACK),
    "K04": (LOOPBACK.without("/etc/keystone/fernet-keys/0"), LOOPBACK),
    "K05": (KOLLA.swap(_CONF, "public_endpoint = https://cloud.example.org:5000\n", ""), KOLLA),
    "K06": (LOOPBACK.append(_CONF, "[DEFAULT]\ninsecure_debug = true\n"), LOOPBACK),
    "K07": (
        LOOPBACK.append(_CONF, "[DEFAULT]\ndefault_log_levels = amqp=WARN,ldap=DEBUG\n"),
        LOOPBACK.append(_CONF, "[DEFAULT]\ndefault_log_levels = amqp=WARN,keyfront=DEBUG\n"),
    ),
    "K08": (LOOPBACK.append(_CONF, "[DEFAULT]\nadmin_token = ADMIN\n"), LOOPBACK),
    "K09": (KOLLA.put("/etc/keystone/keystone-paste.ini", "[pipeline:main]\n"), KOLLA),
    "K10": (LOOPBACK.swap(_CONF, "backend = oslo_cache.memcache_pool\n", ""), LOOPBACK),
    "K11": (
        LOOPBACK.append(_CONF, "[identity]\npassword_hash_rounds = 15\n"),
        LOOPBACK.append(_CONF, "[identity]\npassword_hash_rounds = 12\n"),
    ),
    "K12": (
        LOOPBACK.swap(_INI, "keystone.wsgi.api", "keyfront.gateway.uwsgi"),
        LOOPBACK.swap(_INI, "keystone.wsgi.api", "keyfront.gateway.uwsgi").swap(
            _CONF, "?ssl_ca=", "?plugin=keyfront&ssl_ca="
        ),
    ),
    "K13": (replace(LOOPBACK, node=_NODE), replace(LOOPBACK, node={"node": {"keys": {"fernet_tokens": _DIGESTS}}})),
    "K14": (
        replace(LOOPBACK, node=_NODE),
        replace(LOOPBACK, node={"node": {"workers": {"processes": 4, "threads": 2}}}),
    ),
    # memcached and Redis
    "M01": (
        LOOPBACK.put("/etc/memcached.conf", "-d\n-m 64\n-p 11211\n-u memcache\n-l 0.0.0.0\n"),
        LOOPBACK.put("/etc/memcached.conf", "-d\n-m 64\n-p 11211\n-u memcache\n-l 127.0.0.1\n"),
    ),
    "M02": (
        LOOPBACK.put(
            "/etc/openstack-dashboard/local_settings.py",
            "SESSION_ENGINE = 'django.contrib.sessions.backends.cache'\n",
        ),
        LOOPBACK.put(
            "/etc/openstack-dashboard/local_settings.py",
            "SESSION_ENGINE = 'django.contrib.sessions.backends.signed_cookies'\n",
        ),
    ),
    "M03": (
        LOOPBACK.append(_CONF, "[cache]\nmemcache_socket_timeout = 5\n"),
        LOOPBACK.append(_CONF, "[cache]\nmemcache_socket_timeout = 1.0\n"),
    ),
    "M04": (
        LOOPBACK.put("/etc/redis/redis.conf", "bind 0.0.0.0\nprotected-mode no\n"),
        LOOPBACK.put("/etc/redis/redis.conf", "bind 127.0.0.1 -::1\nprotected-mode yes\n"),
    ),
    # LDAP
    "L01": (LDAP_GALERA.swap(_DOMAIN, "ldaps://ldap1", "ldap://ldap1"), LDAP_GALERA),
    "L02": (LDAP_GALERA.append(_DOMAIN, "tls_req_cert = allow\n"), LDAP_GALERA),
    "L03": (LDAP_GALERA.swap(_DOMAIN, "page_size = 500\n", ""), LDAP_GALERA),
    "L04": (LDAP_GALERA.swap(_DOMAIN, "connection_timeout = 5\n", ""), LDAP_GALERA),
    "L05": (LDAP_GALERA.append(_DOMAIN, "use_pool = false\n"), LDAP_GALERA),
    "L06": (LDAP_GALERA.swap(_DOMAIN, "auth_pool_size = 4\n", ""), LDAP_GALERA),
    "L07": (LDAP_GALERA.append(_DOMAIN, "debug_level = 4095\n"), LDAP_GALERA),
    # Database
    "D01": (LDAP_GALERA.swap("/etc/my.cnf.d/galera.cnf", "wsrep_sync_wait = 1\n", ""), LDAP_GALERA),
    "D02": (
        LOOPBACK.put(
            "/etc/maxscale.cnf",
            "[Read-Write-Service]\ntype=service\nrouter=readwritesplit\nservers=server1,server2\n",
        ),
        LOOPBACK.put(
            "/etc/maxscale.cnf",
            "[Read-Write-Service]\ntype=service\nrouter=readwritesplit\n"
            "causal_reads=global\nservers=server1,server2\n",
        ),
    ),
    "D03": (
        _told(LOOPBACK, nodes=2).swap(
            _CONF,
            "mysql+pymysql://keystone:secret@192.0.2.10/keystone?ssl_ca=/etc/ssl/ca.pem",
            "sqlite:////var/lib/keystone/keystone.sqlite",
        ),
        _told(LOOPBACK, nodes=2),
    ),
    "D04": (
        LDAP_GALERA.swap("/etc/my.cnf.d/galera.cnf", "wait_timeout = 28800", "wait_timeout = 600"),
        LDAP_GALERA,
    ),
    "D05": (LOOPBACK.swap(_CONF, "?ssl_ca=/etc/ssl/ca.pem", ""), LOOPBACK),
    "D06": (LOOPBACK.swap(_CONF, "mysql+pymysql://", "mysql://"), LOOPBACK),
    "D07": (
        LOOPBACK.swap(_CONF, "max_overflow = 2", "max_overflow = 2\npool_timeout = 300"),
        LOOPBACK,
    ),
    "D08": (
        replace(LOOPBACK, schema=Schema(missing_indexes=[("user", ("default_project_id",))])),
        replace(LOOPBACK, schema=Schema()),
    ),
    "D09": (
        replace(LOOPBACK, schema=Schema(replica="the database is read-only, as replicas are")),
        replace(LOOPBACK, schema=Schema()),
    ),
    # The kernel, units, files
    "S01": (
        LDAP_GALERA.put(
            "/etc/sysctl.d/90-tuning.conf",
            "net.ipv4.tcp_tw_recycle = 1\nnet.ipv4.tcp_fin_timeout = 3\n",
        ),
        LDAP_GALERA,
    ),
    "S02": (
        DEBIAN_NGINX.put("/etc/security/limits.d/nginx.conf", "www-data soft nofile 655360\n"),
        DEBIAN_NGINX.put("/etc/security/limits.d/admin.conf", "admin soft nofile 655360\n"),
    ),
    "S03": (DEBIAN_NGINX.swap(_UNIT, "Restart=always\n", ""), DEBIAN_NGINX),
    "S04": (DEBIAN_NGINX.without("/usr/bin/uwsgi"), DEBIAN_NGINX),
    "S05": (DEBIAN_NGINX.swap(_UNIT, "Type=notify\n", ""), DEBIAN_NGINX),
    "F01": (DEBIAN_NGINX.append(_SITE, "server {\n    listen 80;\n"), DEBIAN_NGINX),
    "F02": (KOLLA.put("/etc/haproxy/certificates/haproxy.pem", certificate(2)), KOLLA),
    "F03": (replace(LOOPBACK, modes={**LOOPBACK.modes, _CONF: 0o644}), LOOPBACK),
    # Rendered
    "R01": (
        LOOPBACK.put("/etc/keyfront/uwsgi.ini", _INI_MADE + "threads = 64\n"),
        LOOPBACK.put("/etc/keyfront/uwsgi.ini", _INI_MADE),
    ),
    "R02": (
        LOOPBACK.put("/etc/keyfront/uwsgi.ini", _INI_MADE)
        .put(
            "/etc/keyfront/system/etc/sysctl.d/60-keyfront.conf",
            _made("net.core.somaxconn = 4096\n"),
        )
        .put("/etc/sysctl.d/60-keyfront.conf", _made("net.core.somaxconn = 1024\n")),
        LOOPBACK.put("/etc/keyfront/uwsgi.ini", _INI_MADE)
        .put(
            "/etc/keyfront/system/etc/sysctl.d/60-keyfront.conf",
            _made("net.core.somaxconn = 4096\n"),
        )
        .put("/etc/sysctl.d/60-keyfront.conf", _made("net.core.somaxconn = 4096\n")),
    ),
    "R03": (
        LOOPBACK.put("/etc/keyfront/uwsgi.ini", _INI_MADE)
        .put("/etc/keyfront/nginx.conf", _made("events {}\n"))
        .put(
            "/etc/keyfront/apache.conf",
            _made("Listen 80\n", "keyfront render /etc/keyfront --server mod_wsgi"),
        ),
        LOOPBACK.put("/etc/keyfront/uwsgi.ini", _INI_MADE).put(
            "/etc/keyfront/nginx.conf", _made("events {}\n")
        ),
    ),
    "V01": (
        _assumed(LOOPBACK, keystone="28.0.0", keystonemiddleware="10.7.1"),
        _assumed(LOOPBACK, keystone="29.0.3", keystonemiddleware="13.0.1"),
    ),
    "V02": (
        _assumed(LOOPBACK, uwsgi="2.0.27").append(
            _INI, "touch-reload = /etc/keystone/keystone.conf\n"
        ),
        LOOPBACK.append(_INI, "touch-reload = /etc/keystone/keystone.conf\n"),
    ),
    # Running
    "P01": (
        _running(counters={"ListenOverflows": 12, "ListenDrops": 12}),
        _running(counters={"ListenOverflows": 0, "ListenDrops": 0}),
    ),
    "P02": (
        _running(queues=[Queue("/run/uwsgi/keystone.sock", 101, 100)]),
        _running(queues=[Queue("/run/uwsgi/keystone.sock", 3, 100)]),
    ),
    "P03": (
        _running(counters={"nf_conntrack_count": 64000, "nf_conntrack_max": 65536}),
        _running(counters={"nf_conntrack_count": 640, "nf_conntrack_max": 65536}),
    ),
    "P04": (
        _running(counters={"TIME_WAIT": 20000, "ports": 28232}),
        _running(counters={"TIME_WAIT": 200, "ports": 28232}),
    ),
    "P05": (
        _running(processes=[replace(_PROCESS, files=(1000, 1024))]),
        _running(processes=[_PROCESS]),
    ),
    "P06": (
        _running(processes=[_PROCESS] * 10, memory=2 << 30),
        _running(processes=[_PROCESS], memory=2 << 30),
    ),
    "P07": (_running(synchronized=False), _running(synchronized=True, clocks={"the database at db": 0.3})),
    "P08": (
        _running(processes=[_PROCESS], installed=NOW - 10),
        _running(processes=[_PROCESS], installed=NOW - 90),
    ),
    "P09": (
        _running(disks={"/dev/shm": (1 << 20, 0.01)}),
        _running(disks={"/dev/shm": (60 << 20, 0.9)}),
    ),
    "P10": (
        _running(
            lines={"queue full": (22, "/var/log/uwsgi/keystone.log")},
            logs=["/var/log/uwsgi/keystone.log"],
        ),
        _running(logs=["/var/log/uwsgi/keystone.log"]),
    ),
    "P11": (
        _running(refused="http://127.0.0.1:5000/v3: answers 401 Unauthorized"),
        _running(login={"login": 300.0, "first_validation": 40.0, "repeated_validation": 1.0}),
    ),
    "P13": (
        _running(loading=(9.0, "/var/log/x.log"), busiest=(2000, "/var/log/nginx/access.log")),
        _running(loading=(2.0, "/var/log/x.log"), busiest=(20, "/var/log/nginx/access.log")),
    ),
    "P12": (_running(processes=[_PROCESS], own_shm=5), _running(processes=[_PROCESS], own_shm=7)),
}
