"""The table of providers, regions and proxies."""

from __future__ import annotations

import pytest

from runner.storage.s3.providers import ALIYUN, AWS, CLOUDFLARE, GOOGLE, HUAWEI, OTHER, Provider, provider_of, region_in
from runner.storage.s3.proxies import Proxies


@pytest.mark.parametrize(
    ("endpoint", "provider", "region"),
    [
        (None, AWS, None),
        ("https://s3.eu-west-3.amazonaws.com", AWS, None),
        ("https://s3.cn-north-1.amazonaws.com.cn", AWS, None),
        ("https://obs.cn-north-4.myhuaweicloud.com", HUAWEI, "cn-north-4"),
        ("https://obs.eu-west-101.myhuaweicloud.eu", HUAWEI, "eu-west-101"),
        ("https://storage.googleapis.com", GOOGLE, "auto"),
        ("https://abc.r2.cloudflarestorage.com", CLOUDFLARE, "auto"),
        ("https://oss-cn-hangzhou.aliyuncs.com", ALIYUN, "cn-hangzhou"),
        ("https://s3.oss-cn-hangzhou-internal.aliyuncs.com", ALIYUN, "cn-hangzhou"),
        ("http://minio:9000", OTHER, "us-east-1"),
        ("http://127.0.0.1:8333", OTHER, "us-east-1"),
        ("https://amazonaws.com.example.org", OTHER, "us-east-1"),
    ],
)
def test_an_endpoint_tells_provider_and_region(endpoint: str | None, provider: Provider, region: str | None) -> None:
    assert provider_of(endpoint) is provider
    assert region_in(endpoint) == region


@pytest.mark.parametrize(
    ("environ", "url", "expected"),
    [
        ({}, "https://a.example.com", None),
        ({"HTTPS_PROXY": "http://p"}, "https://a.example.com", "http://p"),
        ({"https_proxy": "http://p"}, "https://a.example.com", "http://p"),
        ({"HTTPS_PROXY": "http://p"}, "http://a.example.com", None),
        ({"ALL_PROXY": "http://p"}, "http://a.example.com", "http://p"),
        ({"HTTPS_PROXY": "http://p", "NO_PROXY": "b.com, .example.com"}, "https://a.example.com", None),
        ({"HTTPS_PROXY": "http://p", "NO_PROXY": "example.com"}, "https://A.example.com", None),
        ({"HTTPS_PROXY": "http://p", "NO_PROXY": "example.com"}, "https://anexample.com", "http://p"),
        ({"HTTPS_PROXY": "http://p", "no_proxy": "*"}, "https://a.example.com", None),
        ({"HTTP_PROXY": "http://p", "NO_PROXY": "10.0.0.0/8"}, "http://10.1.2.3:9000", None),
        ({"HTTP_PROXY": "http://p", "NO_PROXY": "10.0.0.0/8"}, "http://11.1.2.3:9000", "http://p"),
        ({"HTTP_PROXY": "http://p", "NO_PROXY": "minio:9000"}, "http://minio:9000", None),
        ({"HTTP_PROXY": "http://p", "NO_PROXY": "minio:9000"}, "http://minio:9001", "http://p"),
    ],
)
def test_proxies(environ: dict[str, str], url: str, expected: str | None) -> None:
    assert Proxies.of(environ).for_url(url) == expected
