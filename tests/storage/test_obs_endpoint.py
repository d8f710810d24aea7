"""Where a bucket of OBS is asked, and in which style."""

from __future__ import annotations

import pytest

from runner.errors import StoreError
from runner.storage.access import Access
from runner.storage.obs.endpoint import Endpoint, Proxy, endpoint_of

NORTH = "https://obs.cn-north-4.myhuaweicloud.com"


@pytest.mark.parametrize(
    ("access", "expected"),
    [
        (Access(region="cn-north-4"), Endpoint(NORTH, virtual=True, region="cn-north-4")),
        (Access(environ={"OBS_REGION": "cn-north-4"}), Endpoint(NORTH, virtual=True, region="cn-north-4")),
        (Access(endpoint=f"{NORTH}/"), Endpoint(NORTH, virtual=True, region="cn-north-4")),
        (Access(environ={"OBS_ENDPOINT": NORTH, "OBS_REGION": "x"}), Endpoint(NORTH, virtual=True, region="x")),
        (Access(endpoint="obs.example.com"), Endpoint("https://obs.example.com", virtual=True)),
        (Access(endpoint="http://obs.x", environ={"OBS_ENDPOINT": NORTH}), Endpoint("http://obs.x", virtual=True)),
        (Access(endpoint="http://10.0.0.1:80"), Endpoint("http://10.0.0.1:80", virtual=False)),
        (Access(endpoint="http://10.0.0.1", addressing="virtual"), Endpoint("http://10.0.0.1", virtual=False)),
        (Access(endpoint="http://localhost:9000"), Endpoint("http://localhost:9000", virtual=False)),
        (Access(endpoint=NORTH, addressing="path"), Endpoint(NORTH, virtual=False, region="cn-north-4")),
        (Access(endpoint=NORTH, addressing="auto"), Endpoint(NORTH, virtual=True, region="cn-north-4")),
    ],
)
def test_what_is_said_decides(access: Access, expected: Endpoint) -> None:
    assert endpoint_of("bucket", access) == expected


def test_no_certificate_covers_a_bucket_with_dots() -> None:
    assert not endpoint_of("a.b", Access(endpoint=NORTH)).virtual
    assert endpoint_of("a.b", Access(endpoint="http://obs.example.com")).virtual


def test_without_a_place_it_says_what_to_set() -> None:
    with pytest.raises(StoreError) as caught:
        endpoint_of("bucket", Access())
    assert "storage.endpoint" in caught.value.hint
    assert "OBS_REGION" in caught.value.hint


@pytest.mark.parametrize("endpoint", ["ftp://obs.x", "https://", "http://[::1]:9000"])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(StoreError, match="bad endpoint"):
        endpoint_of("bucket", Access(endpoint=endpoint))


def test_proxies_of_the_environment() -> None:
    def proxy(**environ: str) -> Proxy | None:
        return endpoint_of("bucket", Access(endpoint=NORTH, environ=environ)).proxy

    assert proxy(HTTPS_PROXY="http://proxy:3128") == Proxy("proxy", 3128)
    assert proxy(https_proxy="user:p%40ss@proxy") == Proxy("proxy", 80, "user", "p@ss")
    assert proxy(HTTP_PROXY="http://proxy:3128") is None
    assert proxy(HTTPS_PROXY="http://proxy", NO_PROXY="localhost,.myhuaweicloud.com") is None
    assert "p@ss" not in repr(proxy(https_proxy="user:p%40ss@proxy"))
