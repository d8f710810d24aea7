"""What the clients of a bucket are told: by the environment alone where it says all, else by botocore's chain."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.errors import AccessDenied
from runner.storage.access import Access
from runner.storage.s3.settings import EnvironmentLogin, Settings, settings_of
from tests.storage.test_s3_wire import KEYS


def settings_in(folder: Path, **more: str) -> Settings:
    """With keys in the environment, and no file of settings unless ``more`` names one."""
    files = {"AWS_CONFIG_FILE": str(folder / "none"), "AWS_SHARED_CREDENTIALS_FILE": str(folder / "nothing")}
    return settings_of(Access(environ={**KEYS, **files, **more}))


def test_keys_in_the_environment_alone_are_all(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, AWS_ENDPOINT_URL_S3="http://store", AWS_REGION="x", AWS_SECURITY_TOKEN="t")
    assert (settings.endpoint, settings.region) == ("http://store", "x")
    assert isinstance(settings.login, EnvironmentLogin)
    assert settings.login.get_frozen_credentials() == ("a", "b", "t")


def test_endpoints_that_are_to_be_ignored_are_ignored(tmp_path: Path) -> None:
    more = {"AWS_ENDPOINT_URL_S3": "http://store", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}
    assert settings_in(tmp_path, **more).endpoint is None


def test_keys_that_expire_are_watched(tmp_path: Path) -> None:
    login = settings_in(tmp_path, AWS_CREDENTIAL_EXPIRATION="2999-01-01T00:00:00Z").login
    assert not isinstance(login, EnvironmentLogin)


@pytest.mark.parametrize("name", ["AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"])
def test_a_file_of_settings_counts_beside_keys(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("[default]\nregion = eu-north-1\nendpoint_url = http://of-the-file\n")
    settings = settings_in(tmp_path, **{name: str(tmp_path / "file")})
    assert (settings.endpoint, settings.region) == ("http://of-the-file", "eu-north-1")


def test_half_of_the_keys_is_said_and_no_fault_of_ours(tmp_path: Path) -> None:
    with pytest.raises(AccessDenied):
        settings_in(tmp_path, AWS_SECRET_ACCESS_KEY="").login.get_frozen_credentials()
