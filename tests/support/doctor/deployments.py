# ruff: noqa: E501 - the lines of others' files are as long as they are
"""Clean deployments: what deployment tools write, equivalent and mended, each with nothing wrong.

Some serve other services beside Keystone, whose own ways are none of its faults.

The faults that those tools really leave are put back in :mod:`.cases`.
"""

from __future__ import annotations

from .machines import NOW, Machine, certificate

_CONF = """\
[DEFAULT]
log_file = /var/log/keystone/keystone.log
public_endpoint = https://cloud.example.org:5000
[database]
connection = mysql+pymysql://keystone:secret@192.0.2.10/keystone?ssl_ca=/etc/ssl/ca.pem
max_pool_size = 2
max_overflow = 2
[oslo_middleware]
enable_proxy_headers_parsing = true
[token]
provider = fernet
expiration = 86400
allow_expired_window = 172800
[fernet_tokens]
key_repository = /etc/keystone/fernet-keys
max_active_keys = 5
[cache]
backend = oslo_cache.memcache_pool
enabled = true
memcache_servers = 192.0.2.11:11211,192.0.2.12:11211
[healthcheck]
backends = disable_by_file
"""
# Rotated each day.
_KEYS = {f"/etc/keystone/fernet-keys/{number}": f"key{number}" for number in (0, 8, 9, 10)}
_AGES = {
    "/etc/keystone/fernet-keys/8": 259200.0,
    "/etc/keystone/fernet-keys/9": 172800.0,
    "/etc/keystone/fernet-keys/10": 86400.0,
    "/etc/keystone/fernet-keys/0": 86400.0,
}
_MODES = dict.fromkeys(_KEYS, 384) | {"/etc/keystone/fernet-keys": 0o700}

UWSGI_INI = """\
[uwsgi]
strict = true
module = keystone.wsgi.api:application
master = true
processes = 4
threads = 2
socket = /run/uwsgi/keystone.sock
chmod-socket = 660
chown-socket = keystone:www-data
listen = 1024
buffer-size = 65535
lazy-apps = true
enable-threads = true
thunder-lock = true
need-app = true
vacuum = true
single-interpreter = true
harakiri = 60
worker-reload-mercy = 60
die-on-term = true
hook-master-start = unix_signal:15 gracefully_kill_them_all
max-requests = 10000
max-requests-delta = 500
disable-logging = true
"""
UNIT = """\
[Unit]
Description=Keystone
[Service]
Type=notify
User=keystone
ExecStart={program} --ini {ini}
KillMode=mixed
Restart=always
TimeoutStopSec=90
MemoryMax=2G
[Install]
WantedBy=multi-user.target
"""
NGINX_CONF = """\
user www-data;
worker_processes auto;
worker_rlimit_nofile 16384;
pid /run/nginx.pid;
events {
    worker_connections 4096;
}
http {
    sendfile on;
    include /etc/nginx/mime.types;
    ssl_protocols TLSv1.2 TLSv1.3;
    access_log /var/log/nginx/access.log;
    client_max_body_size 114688;
    large_client_header_buffers 4 32k;
    map "$request_method:$uri" $login {
        default "";
        ~^POST:.*/auth/tokens$ $binary_remote_addr;
    }
    limit_req_zone $login zone=logins:10m rate=5r/s;
    limit_req_status 429;
    include /etc/nginx/sites-enabled/*;
}
"""
NGINX_SITE = """\
server {
    listen 5000 ssl;
    server_name cloud.example.org;
    location / {
        limit_req zone=logins burst=25 nodelay;
        include /etc/nginx/uwsgi_params;
        uwsgi_param HTTP_X_FORWARDED_FOR $remote_addr;
        uwsgi_param HTTP_X_FORWARDED_PROTO $scheme;
        uwsgi_buffer_size 32k;
        uwsgi_buffers 8 32k;
        uwsgi_read_timeout 75s;
        uwsgi_pass unix:/run/uwsgi/keystone.sock;
    }
}
"""
_NGINX_PARTS = {
    "/etc/nginx/mime.types": "types {\n    text/html html;\n}\n",
    "/etc/nginx/uwsgi_params": "uwsgi_param REQUEST_METHOD $request_method;\n",
}


def keystone(**values: object) -> Machine:
    """A machine with keystone.conf and keys."""
    return Machine(
        files={"/etc/keystone/keystone.conf": _CONF, **_KEYS},
        modes=_MODES,
        ages=_AGES,
        assumed={"uwsgi": "2.0.31", "keystone": "30.0.0"},
        **values,  # type: ignore[arg-type]
    )


def _served(machine: Machine, ini: str, text: str, program: str = "/usr/bin/uwsgi") -> Machine:
    """The machine with a uWSGI that systemd starts."""
    return (
        machine.put(ini, text)
        .put(program, "")
        .put("/etc/systemd/system/keystone-uwsgi.service", UNIT.format(program=program, ini=ini))
    )


#: Debian's packages, nginx in front, as the operator's guides have it.
DEBIAN_NGINX = (
    _served(keystone(), "/etc/keystone/keystone-uwsgi.ini", UWSGI_INI)
    .put("/etc/nginx/nginx.conf", NGINX_CONF)
    .put("/etc/nginx/sites-enabled/keystone", NGINX_SITE)
)
for _path, _text in _NGINX_PARTS.items():
    DEBIAN_NGINX = DEBIAN_NGINX.put(_path, _text)

#: devstack: Apache, mod_proxy_uwsgi, a unix socket.
APACHE_CONF = """\
DefaultRuntimeDir ${APACHE_RUN_DIR}
PidFile ${APACHE_PID_FILE}
Timeout 90
KeepAlive On
User ${APACHE_RUN_USER}
Group ${APACHE_RUN_GROUP}
IncludeOptional mods-enabled/*.load
IncludeOptional mods-enabled/*.conf
Include ports.conf
<Directory />
    Options FollowSymLinks
    AllowOverride None
    Require all denied
</Directory>
IncludeOptional sites-enabled/*.conf
"""
_MPM_EVENT = """\
<IfModule mpm_event_module>
    StartServers 2
    ServerLimit 16
    ThreadsPerChild 25
    MaxRequestWorkers 400
    MaxConnectionsPerChild 0
</IfModule>
"""
APACHE_FILES = {
    "/etc/apache2/apache2.conf": APACHE_CONF,
    "/etc/apache2/envvars": "export APACHE_RUN_USER=www-data\nexport APACHE_RUN_GROUP=www-data\n"
    "export APACHE_PID_FILE=/var/run/apache2$SUFFIX/apache2.pid\n",
    "/etc/apache2/ports.conf": "Listen 80\n<IfModule ssl_module>\n    Listen 443\n</IfModule>\n",
    "/etc/apache2/mods-enabled/mpm_event.load": "LoadModule mpm_event_module /usr/lib/apache2/modules/mod_mpm_event.so\n",
    "/etc/apache2/mods-enabled/mpm_event.conf": _MPM_EVENT,
}
_PROXY = """\
KeepAlive Off
SetEnv proxy-sendchunked 1
RequestHeader set X-Forwarded-For "expr=%{REMOTE_ADDR}"
ProxyPass "/identity" "unix:/var/run/uwsgi/keystone-api.socket|uwsgi://uwsgi-uds-keystone-api" acquire=1 connectiontimeout=5
"""


def _with(machine: Machine, files: dict[str, str]) -> Machine:
    for path, text in files.items():
        machine = machine.put(path, text)
    return machine


DEVSTACK = _with(
    _served(
        keystone(),
        "/etc/keystone/keystone-api-uwsgi.ini",
        UWSGI_INI.replace("/run/uwsgi/keystone.sock", "/var/run/uwsgi/keystone-api.socket"),
        "/opt/stack/data/venv/bin/uwsgi",
    ),
    {**APACHE_FILES, "/etc/apache2/sites-enabled/keystone-api.conf": _PROXY},
)

_HAPROXY = """\
global
    daemon
    log /var/lib/kolla/haproxy/log local0
    maxconn 40000
    stats socket /var/lib/kolla/haproxy/haproxy.sock mode 660 level admin
defaults
    log global
    option redispatch
    retries 3
    timeout http-request 10s
    timeout queue 60s
    timeout connect 10s
    timeout client 95s
    timeout server 95s
    timeout check 10s
    maxconn 10000
"""
_HAPROXY_KEYSTONE = """\
frontend keystone_external_front
    mode http
    http-request del-header X-Forwarded-Proto
    option httplog
    option forwardfor
    http-request set-header X-Forwarded-Proto https if { ssl_fc }
    bind 192.0.2.1:5000 ssl crt /etc/haproxy/certificates/haproxy.pem
    default_backend keystone_external_back
backend keystone_external_back
    mode http
    option httpchk GET /healthcheck
    server control1 192.0.2.21:5000 check inter 2000 rise 2 fall 5
    server control2 192.0.2.22:5000 check inter 2000 rise 2 fall 5
"""
_KOLLA_INI = UWSGI_INI.replace(
    "socket = /run/uwsgi/keystone.sock\nchmod-socket = 660\nchown-socket = keystone:www-data",
    "http-socket = 192.0.2.21:5000",
)
#: kolla-ansible: HAProxy, uWSGI without a web server, a container without systemd.
KOLLA = _with(
    keystone(),
    {
        "/etc/keystone/keystone-uwsgi.ini": _KOLLA_INI,
        "/etc/haproxy/haproxy.cfg": _HAPROXY,
        "/etc/haproxy/services.d/keystone.cfg": _HAPROXY_KEYSTONE,
        "/etc/haproxy/certificates/haproxy.pem": certificate(90),
    },
)

#: OpenStack-Ansible: HAProxy elsewhere, Apache, uWSGI over TCP, a venv.
OSA = _with(
    _served(
        keystone(),
        "/etc/uwsgi/keystone-wsgi-public.ini",
        UWSGI_INI.replace(
            "socket = /run/uwsgi/keystone.sock\nchmod-socket = 660\nchown-socket = "
            "keystone:www-data",
            "socket = 127.0.0.1:35358\nvirtualenv = /openstack/venvs/keystone-31.0.0",
        ),
        "/openstack/venvs/keystone-31.0.0/bin/uwsgi",
    ),
    {
        **APACHE_FILES,
        "/etc/apache2/sites-enabled/keystone.conf": """\
<VirtualHost 192.0.2.31:5000>
    LogLevel info
    RemoteIPHeader X-Forwarded-For
    RemoteIPInternalProxy 192.0.2.1
    ProxyPass "/" "uwsgi://127.0.0.1:35358/" acquire=1 connectiontimeout=5
</VirtualHost>
""",
    },
)

#: puppet-keystone: Apache, mod_wsgi.
WSGI_SITE = """\
<VirtualHost *:5000>
  ServerName controller.example.org
  DocumentRoot "/var/www/cgi-bin/keystone"
  <Directory "/var/www/cgi-bin/keystone">
    Options -Indexes +FollowSymLinks +MultiViews
    AllowOverride None
    Require all granted
  </Directory>
  ErrorLog "/var/log/httpd/keystone_wsgi_error.log"
  CustomLog "/var/log/httpd/keystone_wsgi_access.log" combined
  SetEnvIf X-Forwarded-Proto https HTTPS=1
  RequestHeader set X-Forwarded-For "expr=%{REMOTE_ADDR}"
  WSGIApplicationGroup %{GLOBAL}
  WSGIDaemonProcess keystone display-name=keystone group=keystone processes=4 threads=2 user=keystone request-timeout=45 queue-timeout=45 graceful-timeout=30
  WSGIProcessGroup keystone
  WSGIScriptAlias / "/var/www/cgi-bin/keystone/keystone"
  WSGIPassAuthorization On
</VirtualHost>
"""
_HTTPD = {
    "/etc/httpd/conf/httpd.conf": """\
ServerRoot "/etc/httpd"
Include conf.modules.d/*.conf
User apache
Group apache
KeepAliveTimeout 15
WSGISocketRotation Off
IncludeOptional conf.d/*.conf
""",
    "/etc/httpd/conf.modules.d/00-mpm.conf": "#LoadModule mpm_prefork_module modules/mod_mpm_prefork.so\n"
    "LoadModule mpm_event_module modules/mod_mpm_event.so\n",
    "/etc/httpd/conf.modules.d/10-wsgi.conf": """\
<IfModule !wsgi_module>
    LoadModule wsgi_module modules/mod_wsgi.so
</IfModule>
""",
    "/var/www/cgi-bin/keystone/keystone": "from keystone.wsgi.api import application\n",
}
RDO_PUPPET = _with(keystone(), {**_HTTPD, "/etc/httpd/conf.d/10-keystone_wsgi.conf": WSGI_SITE})

#: openstack-helm: a pod with Apache and mod_wsgi.
OPENSTACK_HELM = _with(
    keystone(),
    {
        "/etc/httpd/conf/httpd.conf": "LoadModule mpm_event_module modules/mod_mpm_event.so\n"
        "LoadModule wsgi_module modules/mod_wsgi.so\nServerLimit 16\nStartServers 2\n"
        "ThreadsPerChild 25\nThreadLimit 64\nMaxRequestWorkers 400\n"
        "IncludeOptional /etc/httpd/conf.d/*.conf\n",
        "/etc/httpd/conf.d/wsgi-keystone.conf": """\
Listen 0.0.0.0:5000
LogFormat "%h %l %u %t \\"%r\\" %>s %b \\"%{Referer}i\\" \\"%{User-Agent}i\\"" combined
<VirtualHost *:5000>
    WSGIDaemonProcess keystone-public processes=4 threads=1 user=keystone group=keystone display-name=%{GROUP} request-timeout=45 queue-timeout=45 graceful-timeout=30
    WSGIProcessGroup keystone-public
    WSGIScriptAlias / /var/www/cgi-bin/keystone/keystone-wsgi-public
    WSGIApplicationGroup %{GLOBAL}
    WSGIPassAuthorization On
    RequestHeader set X-Forwarded-For "expr=%{REMOTE_ADDR}"
    LimitRequestBody 114688
</VirtualHost>
""",
        "/var/www/cgi-bin/keystone/keystone-wsgi-public": "from keystone.wsgi.api import application\n",
    },
)

#: charm-keystone: HAProxy and Apache with mod_wsgi on one unit.
CHARM = _with(
    keystone(),
    {
        "/etc/haproxy/haproxy.cfg": """\
global
    log /dev/log local0
    maxconn 20000
    user haproxy
    spread-checks 0
    stats socket /var/run/haproxy/admin.sock mode 600 level admin
defaults
    log global
    mode tcp
    option tcplog
    retries 3
    timeout queue 9000
    timeout connect 9000
    timeout client 90000
    timeout server 90000
frontend tcp-in_public-port
    mode http
    bind *:5000
    default_backend public-port_192.0.2.41
backend public-port_192.0.2.41
    mode http
    balance leastconn
    option forwardfor
    server keystone-0 192.0.2.41:4980 check
    server keystone-1 192.0.2.42:4980 check
""",
        **APACHE_FILES,
        "/etc/apache2/mods-enabled/wsgi.load": "LoadModule wsgi_module /usr/lib/apache2/modules/mod_wsgi.so\n",
        "/var/www/cgi-bin/keystone/keystone": _HTTPD["/var/www/cgi-bin/keystone/keystone"],
        "/etc/apache2/sites-enabled/wsgi-openstack-api.conf": WSGI_SITE.replace("*:5000", "*:4980"),
    },
)

#: SAP's alternative: uWSGI behind an ingress, in a pod.
CONVERGED_CLOUD = _with(
    keystone(),
    {
        "/etc/keystone/uwsgi-keystone.ini": UWSGI_INI.replace(
            "socket = /run/uwsgi/keystone.sock\nchmod-socket = 660\nchown-socket = "
            "keystone:www-data",
            "http-socket = 0.0.0.0:5000",
        ).replace("processes = 4", "processes = 8"),
    },
)

#: A directory's users, on TripleO's successor: domain files, Galera through one writer, Apache.
_LDAP_DOMAIN = """\
[identity]
driver = ldap
[ldap]
url = ldaps://ldap1.example.org,ldaps://ldap2.example.org
user = cn=keystone,dc=example,dc=org
password = secret
suffix = dc=example,dc=org
page_size = 500
pool_size = 4
auth_pool_size = 4
connection_timeout = 5
pool_connection_timeout = 10
"""
LDAP_GALERA = _with(
    RDO_PUPPET,
    {
        "/etc/keystone/domains/keystone.corp.conf": _LDAP_DOMAIN,
        "/etc/keystone/keystone.conf": _CONF
        + "[identity]\ndomain_specific_drivers_enabled = true\ndomain_config_dir = /etc/keystone/domains\n",
        "/etc/my.cnf": "[client]\nport = 3306\n!includedir /etc/my.cnf.d\n",
        "/etc/my.cnf.d/galera.cnf": """\
[mysqld]
max_connections = 4096
wait_timeout = 28800
wsrep_on = ON
wsrep_cluster_address = gcomm://db1,db2,db3
wsrep_sync_wait = 1
skip-name-resolve
""",
        "/etc/sysconfig/memcached": 'PORT="11211"\nOPTIONS="-l 127.0.0.1 -c 4096"\n',
        "/etc/sysctl.d/99-sysctl.conf": "net.ipv4.ip_nonlocal_bind = 1\nnet.ipv4.tcp_retries2 = 8\n",
        "/etc/security/limits.conf": "# <domain> <type> <item> <value>\nadmin soft nofile 4096\n",
    },
)

#: A small Keystone of keyfront serve's kind: plain uWSGI on this machine.
LOOPBACK = _with(
    keystone(),
    {
        "/etc/keystone/keystone.conf": _CONF.replace(
            "public_endpoint = https://cloud.example.org:5000\n", ""
        ),
        "/etc/keystone/keystone-uwsgi.ini": UWSGI_INI.replace(
            "socket = /run/uwsgi/keystone.sock\nchmod-socket = 660\nchown-socket = "
            "keystone:www-data",
            "http-socket = 127.0.0.1:5000",
        ),
    },
)

#: devstack with all services: Apache has a pass for each, to sockets that are not Keystone's, and
#: a proxy of TLS that leads to itself.
DEVSTACK_WHOLE = _with(
    DEVSTACK,
    {
        f"/etc/apache2/sites-enabled/{name}.conf": f'ProxyPass "/{path}" "unix:/var/run/uwsgi/'
        f'{name}.socket|uwsgi://uwsgi-uds-{name}" retry=0 acquire=1 \n'
        for name, path in (
            ("nova-api", "compute"),
            ("nova-metadata", "metadata"),
            ("placement-api", "placement"),
            ("cinder-api", "volume"),
            ("glance-api", "image"),
            ("neutron-api", "networking"),
        )
    },
).put(
    "/etc/apache2/sites-enabled/http-services-tls-proxy.conf",
    """\
<VirtualHost *:443>
    KeepAlive Off
    ProxyTimeout 20
    RequestHeader set X-Forwarded-Proto "https"
    <Location />
        ProxyPass http://10.0.0.5:80/ retry=0 nocanon
    </Location>
</VirtualHost>
""",
).put(
    "/etc/uwsgi/apps-enabled/nova-api.ini",
    "[uwsgi]\nmodule = nova.wsgi.osapi_compute:application\nsocket = /var/run/uwsgi/nova-api.socket\n",
)

#: nginx that serves a dashboard and glance beside Keystone, each as it needs it.
NGINX_COHOSTED = DEBIAN_NGINX.put(
    "/etc/nginx/sites-enabled/others",
    """\
upstream grafana {
    server 127.0.0.1:3001 max_fails=3;
}
server {
    listen 3000;
    server_name grafana.example.org;
    location / {
        proxy_pass http://grafana;
        proxy_read_timeout 30s;
        proxy_next_upstream error non_idempotent;
    }
}
server {
    listen 9292;
    server_name images.example.org;
    client_max_body_size 0;
    location / {
        include /etc/nginx/uwsgi_params;
        uwsgi_pass unix:/run/uwsgi/glance-api.sock;
    }
}
""",
).put(
    "/etc/systemd/system/uwsgi-glance.service",
    UNIT.format(program="/usr/bin/uwsgi", ini="/etc/glance/glance-uwsgi.ini"),
).put(
    "/etc/glance/glance-uwsgi.ini",
    "[uwsgi]\nmodule = glance.wsgi.api:application\nsocket = /run/uwsgi/glance-api.sock\n"
    "processes = 8\nchmod-socket = 666\n",
)

#: puppet's controller: nova and the dashboard in the same Apache, behind a balancer elsewhere,
#: which mod_remoteip believes; prefork's limit is far from it.
PUPPET_COHOSTED = _with(
    RDO_PUPPET,
    {
        "/etc/httpd/conf.d/10-keystone_wsgi.conf": WSGI_SITE.replace(
            '  RequestHeader set X-Forwarded-For "expr=%{REMOTE_ADDR}"\n',
            "  RemoteIPHeader X-Forwarded-For\n  RemoteIPInternalProxy 192.0.2.1\n",
        ),
        "/etc/httpd/conf.d/00-log.conf": "MaxRequestsPerChild 4000\n"
        'LogFormat "%{X-Forwarded-For}i %l %u %t \\"%r\\" %>s %b" forwarded\n',
        "/etc/httpd/conf.d/10-nova_api_wsgi.conf": """\
<VirtualHost *:8774>
  ServerName controller.example.org
  WSGIDaemonProcess nova-api display-name=nova_api_wsgi group=nova processes=8 threads=1 user=nova
  WSGIProcessGroup nova-api
  WSGIScriptAlias / "/var/www/cgi-bin/nova/nova-api"
  WSGIPassAuthorization Off
  KeepAliveTimeout 90
</VirtualHost>
<VirtualHost *:80>
  ServerName dashboard.example.org
  WSGIDaemonProcess horizon group=apache processes=1 threads=1 user=apache
  WSGIProcessGroup horizon
  WSGIScriptAlias /dashboard "/usr/share/openstack-dashboard/openstack_dashboard/wsgi/django.wsgi"
</VirtualHost>
""",
    },
)

#: A host of kolla: the containers' files lie in /etc/kolla, and name paths inside the containers.
KOLLA_HOST = _with(
    Machine(assumed={"uwsgi": "2.0.31", "keystone": "30.0.0"}),
    {
        "/etc/kolla/keystone/keystone.conf": _CONF,
        "/etc/kolla/keystone/keystone-uwsgi.ini": _KOLLA_INI
        + "virtualenv = /var/lib/kolla/venv\nplugins-dir = /usr/lib/uwsgi/plugins\n",
        "/etc/kolla/haproxy/haproxy.cfg": _HAPROXY,
        "/etc/kolla/haproxy/services.d/keystone.cfg": _HAPROXY_KEYSTONE,
        "/etc/systemd/system/kolla-keystone-container.service": """\
[Unit]
Description=docker kolla-keystone-container.service
[Service]
Restart=always
ExecStart=/usr/bin/docker start -a keystone
ExecStop=/usr/bin/docker stop keystone -t 90
""",
        "/usr/bin/docker": "",
    },
)

CLEAN = {
    "debian-nginx": DEBIAN_NGINX,
    "devstack": DEVSTACK,
    "kolla": KOLLA,
    "osa": OSA,
    "rdo-puppet": RDO_PUPPET,
    "openstack-helm": OPENSTACK_HELM,
    "charm": CHARM,
    "converged-cloud": CONVERGED_CLOUD,
    "ldap-galera": LDAP_GALERA,
    "loopback": LOOPBACK,
    "devstack-whole": DEVSTACK_WHOLE,
    "nginx-cohosted": NGINX_COHOSTED,
    "puppet-cohosted": PUPPET_COHOSTED,
    "kolla-host": KOLLA_HOST,
}

__all__ = ["CLEAN", "NOW"]
