"""S3's protocol for OBS's bytes: taken where it tells what the SDK tells, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from runner.errors import ObjectMissing
from runner.storage.access import Access
from runner.storage.bucket import Bucket
from runner.storage.obs.bucket import ObsBucket
from runner.storage.obs.credentials import Keys
from runner.storage.obs.face import QuickBucket, s3_face, translated
from tests.servers import Server
from tests.servers.obs import Reply, Work, obs_server


def access_to(server: Server) -> Access:
    keys = {"OBS_ACCESS_KEY_ID": server.access_key, "OBS_SECRET_ACCESS_KEY": server.secret_key}
    return Access(endpoint=server.endpoint, environ=keys)


@pytest.mark.parametrize("kind", ["seaweedfs", "ministack"])
@pytest.mark.parametrize("count", [2, 30])
def test_where_both_tell_the_same_the_face_is_taken(
    request: pytest.FixtureRequest, fresh_bucket: Callable[[Server], str], kind: str, count: int
) -> None:
    server: Server = request.getfixturevalue(kind)
    name = fresh_bucket(server)
    sdk = ObsBucket(name, access_to(server))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: sdk.put(f"a b/{number}", b"x" * number), range(count)))
    face = s3_face(name, access_to(server))
    assert not isinstance(face, str)
    assert face.url == f"obs://{name}"
    info = face.put("by/the/face", b"bytes")
    assert sdk.head("by/the/face").version == info.version.strip('"')


def test_on_a_server_of_obss_own_kind() -> None:
    with obs_server() as server:
        server.make_bucket("b")
        ObsBucket("b", server.access()).put("k", b"content")
        face: Bucket | str = s3_face("b", server.access())
        assert not isinstance(face, str)
        with face.get("k") as answer:
            assert b"".join(bytes(chunk) for chunk in answer.chunks) == b"content"


def test_another_listing_is_no_face() -> None:
    class Forgetful(Work):
        def list_objects(self) -> Reply:
            if self.request.prefix == "x-amz-" and self.request.scheme.startswith("AWS4"):
                self.container = replace(self.container, objects={})
            return super().list_objects()

    with obs_server(work=Forgetful) as server:
        server.make_bucket("b")
        ObsBucket("b", server.access()).put("k", b"content")
        assert s3_face("b", server.access()) == "the two protocols list different objects"


def test_other_bytes_are_no_face() -> None:
    class Wrong(Work):
        def get(self) -> Reply:
            reply = super().get()
            return replace(reply, body=reply.body.upper()) if self.request.scheme.startswith("AWS4") else reply

    with obs_server(work=Wrong) as server:
        server.make_bucket("b")
        ObsBucket("b", server.access()).put("k", b"content")
        assert s3_face("b", server.access()) == "the two protocols read k differently"


def test_a_store_that_does_not_answer_is_no_face() -> None:
    reason = s3_face("b", Access(endpoint="http://127.0.0.1:9", environ={"OBS_ACCESS_KEY_ID": "a",
                                                                        "OBS_SECRET_ACCESS_KEY": "b"}))  # fmt: skip
    assert isinstance(reason, str)
    assert "refused" in reason


def test_the_words_of_s3() -> None:
    access = Access(
        region="cn-north-4", profile="p", requester_pays=True, environ={"AWS_PROFILE": "p", "HTTPS_PROXY": "http://x"}
    )
    said = translated("b", access, Keys("a", "s", "t"))
    assert said.endpoint == "https://obs.cn-north-4.myhuaweicloud.com"
    assert (said.region, said.addressing, said.profile, said.requester_pays) == ("cn-north-4", "virtual", None, True)
    assert dict(said.environ) == {
        "HTTPS_PROXY": "http://x",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_SESSION_TOKEN": "t",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@pytest.mark.parametrize("kind", ["seaweedfs", "own"])
def test_a_quick_bucket_reads_through_the_face_and_writes_by_the_sdk(
    request: pytest.FixtureRequest, fresh_bucket: Callable[[Server], str], kind: str
) -> None:
    server: Server = request.getfixturevalue("obs" if kind == "own" else kind)
    bucket = QuickBucket(fresh_bucket(server), access_to(server))
    info = bucket.put("d/k", b"content")
    [listed] = bucket.page("d/", None).objects
    assert (listed.key, listed.version) == ("d/k", info.version)
    with bucket.get("d/k", version=info.version) as answer:
        assert b"".join(answer.chunks) == b"content"
    assert not isinstance(bucket._reader, str)
    bucket.delete(["d/k"])
    with pytest.raises(ObjectMissing, match="obs://"), bucket.get("d/k"):
        pass


def test_without_proof_the_sdk_reads(fresh_bucket: Callable[[Server], str], seaweedfs: Server) -> None:
    bucket = QuickBucket(fresh_bucket(seaweedfs), access_to(seaweedfs))
    assert bucket.page("nothing/", None).objects == ()
    bucket.put("k", b"content")
    with bucket.get("k") as answer:
        assert b"".join(answer.chunks) == b"content"
    assert bucket._reader == "there is no object to read through both"
