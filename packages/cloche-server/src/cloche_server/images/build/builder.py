"""One build, from the context's tar to an image of the store.

First everything that can be known is worked out here: the plan, each stage's steps, each step's key. Then `making` makes the target.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Any, Final

from cloche.wire.errors import error
from cloche.wire.images import BuildOptions, ImageEvent, ImageView
from cloche_server import points
from cloche_server.images.build import apart, cachekey, copying, ignore, parse
from cloche_server.images.build.copying import Chosen
from cloche_server.images.build.instructions import Arg, Dockerfile
from cloche_server.images.build.making import BuildLimits, Done, Making, Prepared
from cloche_server.images.build.problems import shown, unsupported
from cloche_server.images.build.protocols import Base, BuildCache, Converter, Shelf, Workshop
from cloche_server.images.build.result import Past, document
from cloche_server.images.build.sources import Sources
from cloche_server.images.build.stages import HIDDEN_ARGS, Plan, Stage, plan
from cloche_server.images.build.steps import Config, CopyWork, Step, config_of, follow
from cloche_server.images.build.tree import Tree

ARGS_MAX: Final = 1000
ARG_CHARS_MAX: Final = 128 * 1024


class Builder:
    """One for each build."""

    def __init__(
        self,
        workshop: Workshop,
        shelf: Shelf,
        converter: Converter,
        cache: BuildCache,
        *,
        on_event: Callable[[ImageEvent], None],
        platform: str = "linux/amd64",
        limits: BuildLimits | None = None,
    ) -> None:
        self._workshop = workshop
        self._shelf = shelf
        self._converter = converter
        self._cache = cache
        self._say = on_event
        self._platform = platform
        self._limits = limits or BuildLimits()
        self._sources = Sources(shelf, converter, self._limits.copied_bytes)
        self._images: dict[str, Base] = {}
        self._prepared: dict[int, Prepared] = {}
        self._closing = contextlib.AsyncExitStack()

    async def build(self, context: int, options: BuildOptions) -> ImageView:
        """`context`: a plain tar in an unlinked regular file. The caller closes it."""
        if options.compat:
            raise error("unsupported", "A build with --compat is not this builder's.")
        if len(options.args) > ARGS_MAX or any(len(value) > ARG_CHARS_MAX for value in options.args.values()):
            raise error("invalid_request", "There are too many build arguments, or one is too long.")
        async with self._closing:
            self._closing.callback(self._sources.close)
            whole = await self._sources.index(context, is_context=True)
            dockerfile, seen = await self._read(whole, options.dockerfile)
            order = plan(dockerfile, args=options.args, target=options.target, platform=self._platform)
            self._note(dockerfile, options)
            await self._prepare(order, dockerfile, options, seen, whole)
            making = Making(
                order,
                self._prepared,
                self._images,
                workshop=self._workshop,
                shelf=self._shelf,
                converter=self._converter,
                cache=self._cache,
                sources=self._sources,
                closing=self._closing,
                on_event=self._say,
                limits=self._limits,
                use_cache=not options.no_cache,
            )
            done = await making.make(order.target)
            making.tell_rest()
            config = self._document(order, done)
            points.reached("images.build.before_commit")
            view = await self._shelf.commit(done.layers, config, options.name)
        self._say(ImageEvent(kind="done", image=options.name, digest=view.digest, view=view))
        return view

    async def _read(self, whole: Tree, name: str) -> tuple[Dockerfile, Tree]:
        """The Dockerfile, and the context without what its ignore file leaves out."""
        path = ignore.clean("/" + name).lstrip("/")
        node = whole.resolve(path)
        if node is None or node.type != "file":
            raise error("dockerfile_invalid", f"There is no {shown(name, 100)!r} in the context.")
        if node.size > apart.DOCKERFILE_BYTES_MAX:
            raise error("dockerfile_invalid", f"{shown(name, 100)!r} is too long.")
        dockerfile = await parse.parse(await asyncio.to_thread(os.pread, node.fd, node.size, node.offset))
        for candidate in ignore.candidates(path):
            found = whole.resolve(candidate)
            if found is not None and found.type == "file":
                length = min(found.size, ignore.FILE_BYTES_MAX + 1)
                rules = ignore.Ignore(await asyncio.to_thread(os.pread, found.fd, length, found.offset))
                return dockerfile, await asyncio.to_thread(_without, whole, rules)
        return dockerfile, whole

    def _note(self, dockerfile: Dockerfile, options: BuildOptions) -> None:
        declared = {name for each in dockerfile.instructions if isinstance(each, Arg) for name, _ in each.pairs}
        unused = sorted(set(options.args) - declared - HIDDEN_ARGS)
        notes = [*dockerfile.notes, *(f"the argument {shown(name, 60)!r} is not used." for name in unused[:20])]
        for note in notes:
            self._say(ImageEvent(kind="output", text=f"note: {note}\n"))

    async def _prepare(
        self, order: Plan, dockerfile: Dockerfile, options: BuildOptions, seen: Tree, whole: Tree
    ) -> None:
        """Every needed stage, in order: a stage's base and sources come before it."""
        for index in order.needed:
            stage = order.stages[index]
            base, config, inherited, base_key = None, Config(), {}, "scratch"
            if stage.base.kind == "stage":
                earlier = self._prepared[stage.base.stage]
                config, inherited, base_key = earlier.followed.config, earlier.followed.args, earlier.final_key
            elif stage.base.kind == "image":
                base = await self._image(stage.base.image, stage.line)
                config, base_key = config_of(base.config), base.digest
            followed = follow(
                stage,
                config,
                args=options.args,
                global_args=order.globals,
                escape=dockerfile.escape,
                inherited=inherited,
            )
            start = cachekey.start(base_key, self._platform)
            keys, chosen = await self._keys(stage, followed.steps, start, seen, whole)
            self._prepared[index] = Prepared(stage, base, followed, start, keys, chosen)

    async def _keys(
        self, stage: Stage, steps: tuple[Step, ...], start: str, seen: Tree, whole: Tree
    ) -> tuple[tuple[str, ...], dict[int, Chosen]]:
        keys: list[str] = []
        chosen: dict[int, Chosen] = {}
        key = start
        for number, step in enumerate(steps):
            copied = None
            if isinstance(step.work, CopyWork):
                origin = stage.copies.get(step.work.index)
                if origin is None:
                    hidden = None if whole is seen else whole
                    chosen[number] = await asyncio.to_thread(
                        copying.choose, seen, step.work.sources, line=step.line, text=step.text, hidden=hidden
                    )
                    copied = await asyncio.to_thread(cachekey.content, chosen[number])
                elif origin.kind == "stage":
                    copied = cachekey.origin(self._prepared[origin.stage].final_key, step.work.sources)
                else:
                    copied = cachekey.origin((await self._image(origin.image, step.line)).digest, step.work.sources)
            key = cachekey.after(key, step, copied)
            keys.append(key)
        return tuple(keys), chosen

    async def _image(self, name: str, line: int) -> Base:
        if name not in self._images:
            base = await self._shelf.base(name)
            given = base.config.get("config")
            if isinstance(given, dict) and given.get("OnBuild"):
                raise unsupported(line, f"ONBUILD in the base image {shown(name, 100)}")
            self._images[name] = base
            self._say(ImageEvent(kind="resolved", image=name, digest=base.digest))
        return self._images[name]

    def _document(self, order: Plan, done: Done) -> dict[str, Any]:
        chain = [order.target]
        while order.stages[chain[0]].base.kind == "stage":
            chain.insert(0, order.stages[chain[0]].base.stage)
        base = self._prepared[chain[0]].base
        past = [
            Past(done.created, step.text, step.work is not None)
            for index in chain
            for step in self._prepared[index].followed.steps
        ]
        return document(
            None if base is None else base.config,
            0 if base is None else len(base.layers),
            self._prepared[order.target].followed.config,
            done.layers,
            past,
            self._platform,
        )


def _without(whole: Tree, rules: ignore.Ignore) -> Tree:
    seen = ignore.kept(whole.paths, rules)
    nodes = (whole.get(path) for path in whole.paths if path in seen)
    return Tree(node for node in nodes if node is not None)
