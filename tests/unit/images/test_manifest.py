"""Manifests, indexes and configs: what they mean, and that hostile ones are refused by name."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.wire.errors import ClocheError
from cloche_server.images import manifest as m
from cloche_server.images.manifest import (
    DOCKER_CONFIG,
    DOCKER_INDEX,
    DOCKER_LAYER,
    DOCKER_MANIFEST,
    OCI_CONFIG,
    OCI_INDEX,
    OCI_LAYER,
    OCI_MANIFEST,
    Index,
    Manifest,
    Platform,
    check_pair,
    choose,
    matches,
    parse_config,
    parse_manifest,
    parse_platform,
)
from cloche_server.images.strict import JSON_VALUES_MAX, strict_json

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def described(kind: str = f"{OCI_LAYER}+gzip", digest: Any = A, size: Any = 10, **more: Any) -> dict[str, Any]:
    return {"mediaType": kind, "digest": digest, "size": size, **more}


def manifest(**changes: Any) -> dict[str, Any]:
    found = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": described(OCI_CONFIG, B, 7),
        "layers": [described()],
    }
    return {name: value for name, value in {**found, **changes}.items() if value is not ...}


def index(*platforms: str | None, **changes: Any) -> dict[str, Any]:
    entries = []
    for number, platform in enumerate(platforms):
        named = {}
        if platform is not None:
            names = ("os", "architecture", "variant")
            named = {"platform": dict(zip(names, platform.split("/"), strict=False))}
        entries.append(described(OCI_MANIFEST, f"sha256:{number:064x}", **named))
    return {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries, **changes}


def config(**changes: Any) -> dict[str, Any]:
    found = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": [A]}}
    return {**found, **changes}


def data(document: Any) -> bytes:
    return json.dumps(document).encode()


def reason(document: Any, media_type: str | None = None) -> str:
    with pytest.raises(ClocheError) as raised:
        parse_manifest(document if isinstance(document, bytes) else data(document), media_type)
    assert raised.value.code == "image_refused"
    assert raised.value.message.isprintable()
    return str(raised.value.detail["reason"])


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize(
    ("kind", "compression"),
    [
        (OCI_LAYER, "none"),
        (f"{OCI_LAYER}+gzip", "gzip"),
        (f"{OCI_LAYER}+zstd", "zstd"),
        (DOCKER_LAYER, "none"),
        (f"{DOCKER_LAYER}.gzip", "gzip"),
        (f"{DOCKER_LAYER}.zstd", "zstd"),
    ],
)
def test_a_manifest(kind: str, compression: str) -> None:
    found = parse_manifest(data(manifest(layers=[described(kind), described(kind, B, 0)])), OCI_MANIFEST)
    assert isinstance(found, Manifest)
    assert found.config == m.Descriptor(OCI_CONFIG, B, 7)
    assert [(each.digest, each.size, each.compression) for each in found.layers] == [
        (A, 10, compression),
        (B, 0, compression),
    ]


@pytest.mark.parametrize(
    ("document", "sent_as", "kind"),
    [
        (manifest(), OCI_MANIFEST, OCI_MANIFEST),
        (manifest(), f"{OCI_MANIFEST}; charset=utf-8", OCI_MANIFEST),
        (manifest(), None, OCI_MANIFEST),
        (manifest(), "application/json", OCI_MANIFEST),
        (manifest(mediaType=...), None, OCI_MANIFEST),
        (manifest(mediaType=...), OCI_MANIFEST, OCI_MANIFEST),
        (manifest(mediaType=DOCKER_MANIFEST), None, DOCKER_MANIFEST),
        (manifest(mediaType=DOCKER_MANIFEST, config=described(DOCKER_CONFIG)), DOCKER_MANIFEST, DOCKER_MANIFEST),
        (manifest(layers=None), OCI_MANIFEST, OCI_MANIFEST),
        (index(), None, OCI_INDEX),
        (index(mediaType=DOCKER_INDEX), DOCKER_INDEX, DOCKER_INDEX),
    ],
)
def test_its_kind(document: dict[str, Any], sent_as: str | None, kind: str) -> None:
    assert parse_manifest(data(document), sent_as).media_type == kind


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize(
    ("document", "sent_as", "expected"),
    [
        # Two readers that see two images in one document (CVE-2021-41190).
        ({**manifest(), **index("linux/amd64"), "mediaType": OCI_MANIFEST}, None, "bad_manifest"),
        ({**index(), "layers": []}, OCI_INDEX, "bad_manifest"),
        (manifest(), OCI_INDEX, "media_type"),
        (manifest(), DOCKER_MANIFEST, "media_type"),
        (manifest(mediaType=...), OCI_INDEX, "media_type"),
        (manifest(mediaType=OCI_INDEX), None, "media_type"),
        (index("linux/amd64", mediaType=OCI_MANIFEST), None, "media_type"),
        (manifest(), "text/html", "media_type"),
        (manifest(mediaType=7), None, "bad_manifest"),
        (manifest(schemaVersion=1), None, "unsupported_manifest"),
        (manifest(schemaVersion=True), None, "unsupported_manifest"),
        (manifest(schemaVersion=...), None, "unsupported_manifest"),
        ({"schemaVersion": 2}, None, "bad_manifest"),
        (manifest(config=...), None, "bad_manifest"),
        (manifest(config=[]), None, "bad_manifest"),
        (manifest(config=described("application/vnd.cncf.helm.config.v1+json")), None, "not_an_image"),
        (manifest(config=described(OCI_CONFIG, size=8 * 1024 * 1024 + 1)), None, "bad_size"),
        (manifest(layers=...), None, "bad_manifest"),
        (manifest(layers={}), None, "bad_manifest"),
        (manifest(layers=[7]), None, "bad_manifest"),
        (manifest(layers=[None]), None, "bad_manifest"),
        (manifest(layers=[described()] * 129), None, "too_many_layers"),
        (manifest(layers=[described(size=-1)]), None, "bad_size"),
        (manifest(layers=[described(size=2**63)]), None, "bad_size"),
        (manifest(layers=[described(size=1.5)]), None, "bad_size"),
        (manifest(layers=[described(size="10")]), None, "bad_size"),
        (manifest(layers=[described(size=True)]), None, "bad_size"),
        (manifest(layers=[described(size=None)]), None, "bad_size"),
        (manifest(layers=[described(digest="sha512:" + "0" * 128)]), None, "bad_digest"),
        (manifest(layers=[described(digest=A.upper())]), None, "bad_digest"),
        (manifest(layers=[described(digest=A + "\n")]), None, "bad_digest"),
        (manifest(layers=[described(digest="sha256:../../../etc/passwd")]), None, "bad_digest"),
        (manifest(layers=[described(digest=7)]), None, "bad_digest"),
        (manifest(layers=[described(None)]), None, "bad_manifest"),
        (manifest(layers=[described("x" * 300)]), None, "bad_manifest"),
        (manifest(layers=[described("application/vnd.oci.empty.v1+json")]), None, "layer_type"),
        (manifest(layers=[described("\x1b[31mred")]), None, "layer_type"),
        (
            manifest(layers=[described("application/vnd.oci.image.layer.nondistributable.v1.tar+gzip")]),
            None,
            "foreign_layer",
        ),
        (
            manifest(layers=[described(f"{DOCKER_LAYER.replace('rootfs', 'rootfs.foreign')}.gzip")]),
            None,
            "foreign_layer",
        ),
        (index("linux/amd64", manifests=[described(OCI_MANIFEST, platform=7)]), None, "bad_manifest"),
        (index("linux/amd64", manifests=[described(OCI_MANIFEST, platform={"os": 7})]), None, "bad_manifest"),
        (index("linux/amd64", manifests=[described(OCI_MANIFEST, platform={"os": "x" * 99})]), None, "bad_manifest"),
        (index(manifests=[described(OCI_MANIFEST, size=5 * 1024 * 1024)]), None, "bad_size"),
        (index(*["linux/amd64"] * 1025), None, "too_many_manifests"),
        ([], None, "bad_manifest"),
        (7, None, "bad_manifest"),
    ],
)
def test_a_wrong_one_is_refused(document: Any, sent_as: str | None, expected: str) -> None:
    assert reason(document, sent_as) == expected


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe{}",
        b'{"schemaVersion": 2, "schemaVersion": 2}',
        b'{"layers": [{"size": 1, "size": 2}]}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"9" * 21 + b"}",
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"a": [' + b"[]," * (JSON_VALUES_MAX // 2) + b"[]]}",
    ],
)
def test_hostile_json_is_refused(text: bytes) -> None:
    assert reason(text) == "bad_manifest"


def test_a_long_manifest_is_refused_before_it_is_read() -> None:
    assert reason(b" " * (4 * 1024 * 1024 + 1)) == "manifest_too_large"


PLATFORMS = ["linux/386", "linux/arm/v6", "linux/arm/v7", "linux/arm64/v8", "linux/amd64/v3", "linux/amd64", None]


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize(
    ("wanted", "place"),
    [
        ("linux/amd64", 5),
        ("amd64", 5),
        ("x86_64", 5),
        ("linux/x86_64", 5),
        ("linux/amd64/v1", 5),
        ("linux/amd64/v3", 4),
        ("linux/amd64/v2", 5),
        ("linux/arm64", 3),
        ("aarch64", 3),
        ("linux/arm64/v8", 3),
        ("linux/arm", 2),
        ("linux/arm/v7", 2),
        ("linux/arm/7", 2),
        ("armhf", 2),
        ("linux/arm/v8", 2),
        ("linux/arm/v6", 1),
        ("i386", 0),
    ],
)
def test_the_platform_is_chosen(wanted: str, place: int) -> None:
    found = parse_manifest(data(index(*PLATFORMS)), None)
    assert isinstance(found, Index)
    assert choose(found, wanted) is found.manifests[place]


@pytest.mark.parametrize("wanted", ["linux/s390x", "windows/amd64", "linux/arm/v5", "linux/unknown", "unknown/unknown"])
def test_a_platform_that_it_has_not(wanted: str) -> None:
    found = parse_manifest(data(index(*PLATFORMS)), None)
    assert isinstance(found, Index)
    with pytest.raises(ClocheError, match="linux/amd64") as raised:
        choose(found, wanted)
    assert raised.value.code == "image_not_found"


def test_attestations_and_nested_indexes_are_not_chosen() -> None:
    entries = [
        described(OCI_MANIFEST, platform={"os": "unknown", "architecture": "unknown"}),
        described(OCI_INDEX, platform={"os": "linux", "architecture": "amd64"}),
        described(OCI_MANIFEST, B, platform={"os": "linux", "architecture": "amd64", "os.version": "7"}),
    ]
    found = parse_manifest(data(index(manifests=entries)), None)
    assert isinstance(found, Index)
    assert choose(found, "linux/amd64").digest == B


@pytest.mark.parametrize("text", ["", "/", "linux/", "linux/amd64/v1/x", "linux/a b", "lin\nux/amd64", "ä/amd64"])
def test_what_is_no_platform(text: str) -> None:
    with pytest.raises(ClocheError) as raised:
        parse_platform(text)
    assert raised.value.code == "invalid_request"


@pytest.mark.req("IMG-1")
def test_a_config() -> None:
    run = {
        "Entrypoint": ["/bin/app"],
        "Cmd": ["serve", ""],
        "Env": ["PATH=/bin", "EMPTY=", "NONE", "X=1", "X=2=3"],
        "User": "1000:1000",
        "WorkingDir": "/srv",
        "Labels": {"a": "b"},
        "Shell": ["/bin/sh", "-c"],
        "ExposedPorts": {"80/tcp": {}},
        "Volumes": {"/data": {}},
        "StopSignal": "SIGINT",
    }
    found = parse_config(data(config(config=run, created="2024-01-01T00:00:00Z", variant="v2")))
    assert (found.entrypoint, found.cmd) == (("/bin/app",), ("serve", ""))
    assert found.env == {"PATH": "/bin", "EMPTY": "", "NONE": "", "X": "2=3"}
    assert (found.user, found.workdir, found.labels) == ("1000:1000", "/srv", {"a": "b"})
    assert (found.shell, found.exposed, found.volumes) == (("/bin/sh", "-c"), ("80/tcp",), ("/data",))
    assert (found.stop_signal, found.created, found.diff_ids) == ("SIGINT", "2024-01-01T00:00:00Z", (A,))
    assert str(found.platform) == "linux/amd64/v2"
    assert found.raw["config"] == run


@pytest.mark.parametrize("run", [None, {}, {"Cmd": None, "Env": None, "Labels": None, "User": "", "Volumes": None}])
def test_a_config_that_says_nothing(run: Any) -> None:
    found = parse_config(data(config(config=run)))
    assert (found.entrypoint, found.cmd, found.env, found.user, found.workdir) == ((), (), {}, None, None)


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize(
    "change",
    [
        {"config": 7},
        {"config": {"Cmd": "sh -c"}},
        {"config": {"Cmd": [7]}},
        {"config": {"Cmd": ["a\0b"]}},
        {"config": {"Cmd": ["x" * 128 * 1024]}},
        {"config": {"Cmd": ["x"] * 4097}},
        {"config": {"Env": ["=x"]}},
        {"config": {"Env": [""]}},
        {"config": {"Env": {"A": "B"}}},
        {"config": {"User": 0}},
        {"config": {"WorkingDir": "/a\0"}},
        {"config": {"Labels": {"a": 1}}},
        {"config": {"Labels": []}},
        {"config": {"ExposedPorts": ["80"]}},
        {"architecture": 7},
        {"rootfs": None},
        {"rootfs": {"type": "tree", "diff_ids": []}},
        {"rootfs": {"type": "layers"}},
        {"rootfs": {"type": "layers", "diff_ids": ["sha256:x"]}},
        {"rootfs": {"type": "layers", "diff_ids": [None]}},
    ],
)
def test_a_wrong_config_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ClocheError) as raised:
        parse_config(data(config(**change)))
    assert (raised.value.code, raised.value.detail["reason"]) == ("image_refused", "bad_config")


def test_too_many_diff_ids_and_a_long_config() -> None:
    for text, expected in [
        (data(config(rootfs={"type": "layers", "diff_ids": [A] * 129})), "too_many_diff_ids"),
        (b" " * (8 * 1024 * 1024 + 1), "config_too_large"),
    ]:
        with pytest.raises(ClocheError) as raised:
            parse_config(text)
        assert raised.value.detail["reason"] == expected


@pytest.mark.req("IMG-1")
def test_a_manifest_and_another_images_config() -> None:
    found = parse_manifest(data(manifest(layers=[described()] * 2)), None)
    assert isinstance(found, Manifest)
    check_pair(found, parse_config(data(config(rootfs={"type": "layers", "diff_ids": [A, A]}))))
    with pytest.raises(ClocheError, match="2 layers, the config 1"):
        check_pair(found, parse_config(data(config())))


def test_an_image_without_index_says_its_platform() -> None:
    found = parse_config(data(config(architecture="arm64", variant="v8")))
    assert matches(found, "linux/arm64")
    assert matches(found, Platform("linux", "arm64"))
    assert not matches(found, "linux/amd64")
    assert not matches(parse_config(data(config(architecture="amd64", variant="v3"))), "linux/amd64")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([A, OCI_LAYER, 2]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
fields = ["schemaVersion", "mediaType", "config", "layers", "manifests", "digest", "size", "platform", "rootfs"]
documents = st.dictionaries(st.sampled_from(fields) | st.text(max_size=4), values, max_size=6)


@given(documents, st.none() | st.sampled_from([OCI_MANIFEST, OCI_INDEX]) | st.text(max_size=10))
def test_any_document_is_understood_or_refused(document: dict[str, Any], sent_as: str | None) -> None:
    for changed in (document, {**manifest(), **document}, {**index("linux/amd64"), **document}):
        try:
            parse_manifest(data(changed), sent_as)
        except ClocheError as refused:
            if refused.code != "image_refused":
                raise


@given(documents, documents)
def test_any_config_is_understood_or_refused(document: dict[str, Any], run: dict[str, Any]) -> None:
    for changed in (document, config(**document), config(config=run)):
        try:
            parse_config(data(changed))
        except ClocheError as refused:
            if refused.code != "image_refused":
                raise


@given(st.binary(max_size=200))
def test_any_bytes_are_json_or_refused(text: bytes) -> None:
    try:
        assert isinstance(strict_json(text, 100, "manifest"), dict)
    except ClocheError as refused:
        if refused.code != "image_refused":
            raise
