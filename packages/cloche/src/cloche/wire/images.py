"""Images, as the API shows them: what is here, how a pull or a build goes on, what was found and removed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from .egress import Asked


class ImageConfig(BaseModel):
    """What the image says about how to run it."""

    entrypoint: list[str] = []
    cmd: list[str] = []
    env: dict[str, str] = {}
    user: str | None = None
    workdir: str | None = None
    labels: dict[str, str] = {}


class LostOnConversion(BaseModel):
    """What the image has and a sandbox has not.

    gVisor cannot open an inode with an extended attribute, and an EROFS root gives it no device number: character devices of
    an image are hidden, block devices show as 0:0.
    """

    xattrs: int = 0
    xattr_examples: list[str] = []
    sockets: int = 0
    devices: int = 0


class ImageView(BaseModel):
    """`GET /v1/images`: one image of the store."""

    digest: str
    """Of its manifest: what a sandbox pins."""
    names: list[str] = []
    platform: str
    source: Literal["registry", "archive", "build", "prebuilt"]
    layers: int
    size_bytes: int
    """Compressed layers."""
    root_bytes: int
    """Of the root file system that sandboxes share."""
    entries: int = 0
    created: str | None = None
    added_at: float
    used_at: float
    signed_by: list[str] = []
    private: bool = False
    """Pulled with its owner's own credentials: nobody else sees it."""
    in_use: int = 0
    """Sandboxes that run from it now."""
    config: ImageConfig = ImageConfig()
    lost: LostOnConversion = LostOnConversion()


class ImageList(BaseModel):
    """`GET /v1/images`."""

    images: list[ImageView]


class Credentials(BaseModel):
    """The caller's own, for one pull. Never stored, never logged."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    username: str = Field(max_length=1024)
    password: str = Field(max_length=16384, repr=False)


class PullImage(BaseModel):
    """`POST /v1/images/pull`."""

    model_config = ConfigDict(extra="forbid")

    image: str = Field(max_length=512)
    platform: str | None = Field(default=None, max_length=64)
    credentials: Credentials | None = None


class ImageEvent(BaseModel):
    """One step of a pull, import or build, as Server-Sent Events. The last one is `done` or the call fails."""

    kind: Literal["resolved", "layer", "convert", "step", "output", "done"]
    image: str | None = None
    digest: str | None = None
    """Of the layer, or of the image."""
    bytes_done: int | None = None
    bytes_total: int | None = None
    step: str | None = None
    """A build's instruction, as written."""
    number: int | None = None
    of: int | None = None
    cached: bool | None = None
    text: str | None = None
    """A build's output: the guest's bytes, decoded with replacement."""
    view: ImageView | None = None


class GcImages(BaseModel):
    """`POST /v1/images/gc`."""

    model_config = ConfigDict(extra="forbid")

    max_bytes: int | None = Field(default=None, ge=0)
    max_age_s: float | None = Field(default=None, ge=0)


class GcResult(BaseModel):
    """What a collection removed."""

    images: list[str] = []
    blobs: int = 0
    roots: int = 0
    bytes: int = 0


class FsckProblem(BaseModel):
    """One thing in the store that is not as it must be."""

    path: str
    what: str
    repaired: bool = False


class FsckReport(BaseModel):
    """`POST /v1/images/fsck`."""

    blobs: int
    roots: int
    images: int
    bytes: int
    problems: list[FsckProblem] = []


class BuildOptions(BaseModel):
    """`POST /v1/images/build`: beside the context's tar."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = Field(default=None, max_length=512)
    dockerfile: str = Field(default="Dockerfile", max_length=4096)
    """A path in the context."""
    args: dict[str, str] = {}
    target: str | None = Field(default=None, max_length=128)
    no_cache: bool = False
    compat: bool = False
    """Run buildah inside a sandbox instead of Cloche's own interpreter."""
    memory_bytes: int | None = Field(default=None, gt=0)
    disk_bytes: int | None = Field(default=None, gt=0)
    egress: Annotated[list[Asked], Field(max_length=256)] = []
    """What its RUN steps may reach."""
