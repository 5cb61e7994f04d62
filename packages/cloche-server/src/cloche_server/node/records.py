"""What the state directory holds of each sandbox and command, and the views made of it.

A record is written before the journal line that makes it true. A running command's record holds what is needed to open it
again (its environment among it, in a file of mode 0600); it is dropped when the command ends.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from cloche.wire.commands import Command, CommandState, OutputState
from cloche.wire.egress import EgressRecord, EgressView
from cloche.wire.ends import End
from cloche.wire.sandboxes import Isolation, Limits, Sandbox, SandboxState, Usage
from cloche_server.engines.contract import IsolationReport
from cloche_server.engines.spec import SandboxSpec
from cloche_server.node.clock import NS

_DECODE: Final = msgspec.json.Decoder().decode


class SandboxRecord(msgspec.Struct, kw_only=True):
    """Everything about one sandbox that outlives the daemon, except what the journal says."""

    id: str
    tenant: str
    owner: str
    lineage: str
    name: str | None
    labels: dict[str, str]
    image: str
    image_file: str
    image_digest: str | None
    engine: str
    limits: dict[str, Any]
    privileges: str
    user: str | None
    workdir: str | None
    created_ns: int
    created_at: float
    ttl_deadline_ns: int
    idle_timeout_s: float | None
    retain_s: float
    boot_id: str
    key: str | None = None
    request_sha256: str | None = None
    first_command: str | None = None
    end_with_command: bool = False
    isolation: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    ended_at: float | None = None
    lived_s: float | None = None
    last_usage: dict[str, Any] | None = None
    """What it had used when it ended."""
    egress: dict[str, Any] | None = None
    """What it may reach (`way.Plan`), with its grants. None only of one that an older version made."""

    def spec(self) -> SandboxSpec:
        """What the engine is told."""
        return SandboxSpec(
            id=self.id,
            tenant=self.tenant,
            owner=self.owner,
            lineage=self.lineage,
            engine=self.engine,
            image_file=self.image_file,
            cpus=float(self.limits["cpus"]),
            memory_bytes=self.limits["memory_bytes"],
            processes=self.limits["processes"],
            disk_bytes=self.limits["disk_bytes"],
            open_files=self.limits["open_files"],
        )


class CommandRecord(msgspec.Struct, kw_only=True):
    """One command; `request` is what the caller asked for."""

    id: str
    sandbox: str
    request: dict[str, Any]
    stream: int
    created_ns: int
    created_at: float
    key: str | None = None
    request_sha256: str | None = None
    stdin_offset: int = 0
    output: dict[str, Any] | None = None
    """The state of the output when it ended."""
    end: dict[str, Any] | None = None
    ended_ns: int | None = None
    ended_at: float | None = None
    slot: int = 0
    """Which proxy address inside is its own."""
    denials: list[dict[str, Any]] | None = None
    """The first egress records in which it was refused."""

    @property
    def has_stderr(self) -> bool:
        return self.request["terminal"] is None and not self.request["merge_stderr"]


def isolation_of(report: IsolationReport) -> dict[str, Any]:
    return {
        "class": report.isolation_class,
        "engine": report.engine,
        "version": report.version,
        "digest": report.digest,
        "experimental": report.experimental,
        "host_uid": report.host_uid,
        "cgroup": report.cgroup,
        "weaker": list(report.weaker),
    }


def sandbox_view(
    record: SandboxRecord,
    state: SandboxState,
    *,
    now_ns: int,
    ends_in_s: float | None = None,
    commands_running: int = 0,
    usage: Usage | None = None,
    egress: EgressView | None = None,
) -> Sandbox:
    return Sandbox(
        id=record.id,
        name=record.name,
        tenant=record.tenant,
        owner=record.owner,
        lineage=record.lineage,
        image=record.image,
        image_digest=record.image_digest,
        state=state,
        isolation=Isolation.model_validate(record.isolation) if record.isolation else None,
        limits=Limits.model_validate(record.limits),
        labels=record.labels,
        privileges="package-install" if record.privileges == "package-install" else "none",
        user=record.user,
        workdir=record.workdir,
        created_at=record.created_at,
        age_s=max(0.0, record.lived_s if record.lived_s is not None else (now_ns - record.created_ns) / NS),
        ends_in_s=ends_in_s,
        idle_timeout_s=record.idle_timeout_s,
        commands_running=commands_running,
        usage=Usage.model_validate(record.last_usage) if usage is None and record.last_usage else usage,
        ended=End.model_validate(record.end) if record.end else None,
        first_command=record.first_command,
        egress=egress or EgressView(),
    )


def command_view(
    record: CommandRecord, *, state: CommandState, output: OutputState, runtime_s: float | None
) -> Command:
    request = record.request
    return Command(
        id=record.id,
        sandbox=record.sandbox,
        argv=request["argv"],
        cwd=request["cwd"],
        user=request["user"],
        terminal=request["terminal"] is not None,
        stdin=request["stdin"],
        timeout_s=request["timeout_s"],
        on_full=request["on_full"],
        state=state,
        created_at=record.created_at,
        runtime_s=runtime_s,
        output=output,
        stdin_offset=record.stdin_offset,
        ended=End.model_validate(record.end) if record.end else None,
        denials=[EgressRecord.model_validate(each) for each in record.denials] if record.denials else [],
    )


def ended_command_view(record: CommandRecord) -> Command:
    """Of a command that is only on disk any more."""
    runtime_s = None if record.ended_ns is None else max(0.0, (record.ended_ns - record.created_ns) / NS)
    output = OutputState.model_validate(record.output or {"complete": True})
    return command_view(record, state=CommandState.ENDED, output=output, runtime_s=runtime_s)


def plain_request(text: str) -> dict[str, Any]:
    """Of a request's own JSON."""
    plain: dict[str, Any] = _DECODE(text)
    return plain
