"""nginx as a null S3: static files, listings made beforehand, PUT that only stores. About 0.03 ms of CPU per GET.

Ranks clients, since it takes next to nothing of the machine that they share with it. It checks no signatures, puts no
parts together, and its ETags are no MD5s: a finished multipart upload shows a placeholder of the right size.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.parse import quote
from xml.sax.saxutils import escape

PAGE = 1000
XMLNS = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
ETAG = '"00000001-1"'  # not 32 hex digits: nobody takes it for an MD5
ECHO = Path("/usr/lib/nginx/modules/ngx_http_echo_module.so")

CONFIG = """
{load}
master_process off;
worker_rlimit_nofile 20000;
user root;
daemon off;
pid {base}/nginx.pid;
error_log {base}/error.log warn;
events {{ worker_connections 16384; multi_accept on; }}
http {{
  access_log off; sendfile on; tcp_nopush on; tcp_nodelay on;
  keepalive_timeout 300; keepalive_requests 10000000;
  client_max_body_size 0; client_body_buffer_size 64k; large_client_header_buffers 8 32k;
  client_body_temp_path {base}/tmp; proxy_temp_path {base}/tmp; fastcgi_temp_path {base}/tmp;
  uwsgi_temp_path {base}/tmp; scgi_temp_path {base}/tmp;
  default_type application/octet-stream;
  map $args $token {{ "~(?:^|&)continuation-token=(?<t>[^&]+)" $t; default "0"; }}
  map $args $prefix {{ "~(?:^|&)prefix=(?<p>[^&]+)" $p; default "_all"; }}
  map $args $lists {{ "~(^|&)(list-type=2|prefix=|max-keys=|delimiter=)" 1; default 0; }}
  map $request_method:$args $kind {{
    "~^POST:(.*&)?uploads(=|&|$)" init;
    "~^POST:(.*&)?uploadId=" complete;
    "~^POST:(.*&)?delete(=|&|$)" delete;
    "~^DELETE:(.*&)?uploadId=" abort;
    "~^GET:(.*&)?(location|versioning|acl|tagging)(=|&|$)" meta;
    default object;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    default_type application/octet-stream;
    if ($kind = init) {{ return 200 '<?xml version="1.0"?><InitiateMultipartUploadResult {xmlns}><Bucket>{bucket}</Bucket><Key>k</Key><UploadId>u1</UploadId></InitiateMultipartUploadResult>'; }}
    if ($kind = complete) {{ return 200 '<?xml version="1.0"?><CompleteMultipartUploadResult {xmlns}><Bucket>{bucket}</Bucket><Key>k</Key><ETag>{etag}</ETag></CompleteMultipartUploadResult>'; }}
    if ($kind = delete) {{ return 200 '<?xml version="1.0"?><DeleteResult {xmlns}></DeleteResult>'; }}
    if ($kind = meta) {{ return 200 '<?xml version="1.0"?><LocationConstraint {xmlns}></LocationConstraint>'; }}
    if ($kind = abort) {{ return 204; }}
    if ($lists) {{ rewrite ^ /_list/$prefix/$token.xml last; }}
    if ($arg_partNumber) {{ rewrite ^(.*)$ /_parts$1.$arg_partNumber last; }}
    if ($request_method = PUT) {{ rewrite ^(.*)$ /_put$1 last; }}
    location /_list/ {{ root {base}; types {{ application/xml xml; }} try_files $uri @none; }}
    location @none {{ root {base}; types {{ application/xml xml; }} rewrite ^ /_list/_none.xml break; }}
    location /_parts/ {{ root {base}; dav_methods PUT; create_full_put_path on; add_header ETag '{etag}'; }}
    location /_put/ {{ alias {base}/data/; dav_methods PUT; create_full_put_path on; add_header ETag '{etag}'; }}
    location = /{bucket} {{ return 200; }}
    location = /{bucket}/ {{ return 200; }}
    location / {{ {object} }}
    location @file {{ root {base}/data; dav_methods DELETE; }}
  }}
}}
"""  # noqa: E501 - nginx takes no line breaks inside an answer


def nginx_program() -> str:
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None or not ECHO.exists():
        sys.exit("error: nginx is not installed\nhint: apt-get install nginx libnginx-mod-http-echo")
    return found


@contextmanager
def null_s3(base: Path, bucket: str, latency: float = 0.0) -> Iterator[str]:
    """The endpoint of a null S3 that serves ``base``/data/``bucket``; ``latency`` in seconds, before each first byte.

    Listings are those of :func:`write_listing`.
    """
    from tests.servers.process import free_ports, serving  # noqa: PLC0415 - boto3 comes with it

    (port,) = free_ports(1)
    for folder in ("tmp", "_parts", f"data/{bucket}", "_list"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    (base / "_list/_none.xml").write_text(page_of([], bucket, "", None))
    served = "root {base}/data; dav_methods DELETE;" if not latency else "echo_sleep {latency}; echo_exec @file;"
    config = CONFIG.format(
        load=f"load_module {ECHO};" if latency else "",
        base=base, port=port, bucket=bucket, xmlns=XMLNS, etag=ETAG, object=served.format(base=base, latency=latency),
    )  # fmt: skip
    (base / "nginx.conf").write_text(config)
    endpoint = f"http://127.0.0.1:{port}"
    with serving([nginx_program(), "-p", str(base), "-c", f"{base}/nginx.conf"], base, lambda: _answers(endpoint)):
        yield endpoint


def write_listing(base: Path, bucket: str, prefix: str) -> None:
    """Pages for all objects below ``prefix``, which ends in ``/``; under its quoted and its plain spelling."""
    folder = base / "data" / bucket / prefix
    rows = sorted((f"{prefix}{path.name}", path.stat()) for path in folder.iterdir())
    pages = [rows[at : at + PAGE] for at in range(0, len(rows), PAGE)] or [[]]
    for number, page in enumerate(pages):
        token, after = (f"t{n}" if n else "0" for n in (number, number + 1))
        text = page_of(page, bucket, prefix, after if number + 1 < len(pages) else None)
        for spelling in {prefix, quote(prefix, safe=""), prefix.rstrip("/")}:
            path = base / "_list" / spelling / f"{token}.xml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def page_of(rows: list[tuple[str, os.stat_result]], bucket: str, prefix: str, after: str | None) -> str:
    objects = "".join(_object(key, info) for key, info in rows)
    more = f"<NextContinuationToken>{after}</NextContinuationToken>" if after else ""
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult {XMLNS}><Name>{bucket}</Name>'
        f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(rows)}</KeyCount><MaxKeys>{PAGE}</MaxKeys>"
        f"<IsTruncated>{'true' if after else 'false'}</IsTruncated>{more}{objects}</ListBucketResult>"
    )


def _object(key: str, info: os.stat_result) -> str:
    # The ETag that nginx itself gives the file: If-Match answers 412 to any other.
    etag = f"&quot;{int(info.st_mtime):x}-{info.st_size:x}&quot;"
    modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(info.st_mtime))
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>{modified}</LastModified><ETag>{etag}</ETag>"
        f"<Size>{info.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )


def _answers(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(f"{endpoint}/?list-type=2&prefix=none", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
