"""An archive that a guest wrote (a build with --compat) gives one image, and names nothing."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from tests.unit.images.plain_parts import HOST, MemoryRegistry, open_images, pieces
from tests.unit.images.pushing import tar_of

OWNER = "uid:1"
NAME = f"{HOST}/team/app:1"

pytestmark = pytest.mark.req("IMG-2")


async def exported(directory: Path) -> bytes:
    registry = MemoryRegistry()
    registry.add(NAME, [tar_of({"a": b"a"})])
    images = await open_images(directory, registry)
    await images.ensure(NAME, owner=OWNER)
    data = b"".join([piece async for piece in images.export(NAME, OWNER)])
    await images.close()
    return data


async def test_what_the_archive_calls_it_is_ignored(tmp_path: Path) -> None:
    data = await exported(tmp_path)
    assert json.dumps(NAME).encode() in data, "it has a name in it"
    (tmp_path / "second").mkdir()
    images = await open_images(tmp_path / "second")
    (view,) = await images.import_archive(pieces(data), owner=OWNER, is_one=True)
    assert view.names == []
    (view,) = await images.import_archive(pieces(data), "localhost/mine:1", owner=OWNER, is_one=True)
    assert view.names == ["localhost/mine:1"]
    await images.close()


async def test_two_images_are_refused(tmp_path: Path) -> None:
    data = await exported(tmp_path)
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as source, tarfile.open(fileobj=out, mode="w") as sink:
        for info in source:
            content = source.extractfile(info).read() if info.isreg() else b""  # type: ignore[union-attr]
            if info.name == "index.json":
                index = json.loads(content)
                index["manifests"] *= 2
                content = json.dumps(index).encode()
                info.size = len(content)
            sink.addfile(info, io.BytesIO(content))
    (tmp_path / "second").mkdir()
    images = await open_images(tmp_path / "second")
    with pytest.raises(ClocheError) as caught:
        await images.import_archive(pieces(out.getvalue()), owner=OWNER, is_one=True)
    assert (caught.value.code, caught.value.detail["reason"]) == ("image_refused", "too_many_images")
    assert images.list(OWNER) == []
    await images.close()
