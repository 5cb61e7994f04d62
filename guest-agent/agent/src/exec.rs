//! `exec`: from OPEN to a running command, and from its exit to END.

use crate::child::{self, Launch};
use crate::context::Context;
use crate::failure::{Failure, Outcome};
use crate::json::Object;
use crate::operation::{Command, Exit, Operation, Role, Task};
use crate::pty::{self, Pty};
use crate::users::Identity;
use crate::wire::{self, Text};
use cloche_protocol::limits::PACKAGE_INSTALL_CAPABILITIES;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};

const PATH_DEFAULT: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const ARGUMENTS_MAX: usize = 65_536;

type Environment = BTreeMap<Vec<u8>, Vec<u8>>;

/// The command's ends of its descriptors, closed here once it runs.
struct Ends {
    stdio: [OwnedFd; 3],
    operation: Operation,
}

pub fn start(
    context: &mut Context,
    stream: u32,
    stderr: Option<u32>,
    ask: &wire::Exec,
) -> Outcome<Operation> {
    if ask.argv.is_empty() || ask.argv.len() > ARGUMENTS_MAX {
        return Err(Failure::invalid("argv must have between 1 and 65536 entries"));
    }
    let user = ask.user.clone().unwrap_or_else(|| context.config.user.clone());
    let identity = context.users().resolve(&user)?;
    let capabilities = capabilities(ask.privileges.as_deref(), context.rights.permitted)?;
    let env = environment(context, ask, &identity);
    let ends = match &ask.pty {
        Some(size) => terminal(stream, stderr, size, &identity)?,
        None => pipes(context, stream, stderr, ask.stdin)?,
    };
    let launch = Launch {
        candidates: candidates(&ask.argv[0].0, env.get(&b"PATH"[..]))?,
        argv: ask.argv.iter().map(|text| c_string(&text.0)).collect::<Outcome<_>>()?,
        env: env
            .iter()
            .map(|(key, value)| c_string(&[key, &b"="[..], value].concat()))
            .collect::<Outcome<_>>()?,
        cwd: c_string(ask.cwd.as_ref().map_or(b"/", |cwd| &cwd.0))?,
        uid: identity.uid,
        gid: identity.gid,
        groups: identity.groups,
        capabilities,
        bounding: context.rights.bounding,
        umask: ask.umask.filter(|mask| *mask != 0o022),
        processes: context.config.limits.processes,
        open_files: context.config.limits.open_files,
        stdio: [0, 1, 2].map(|n: usize| ends.stdio[n].as_raw_fd()),
        terminal: ask.pty.is_some(),
    };
    let started_ns = boot_clock_ns();
    let pid = child::start(&launch, &mut context.stack)?;
    let mut operation = ends.operation;
    if let Task::Command(command) = &mut operation.task {
        command.pid = pid;
        command.started_ns = started_ns;
    }
    Ok(operation)
}

fn c_string(bytes: &[u8]) -> Outcome<CString> {
    CString::new(bytes).map_err(|_| Failure::invalid("a NUL byte in an argument"))
}

/// What a command, or a file operation, keeps: never more than the agent itself has.
pub fn capabilities(privileges: Option<&str>, permitted: u64) -> Outcome<u64> {
    match privileges {
        None | Some("none") => Ok(0),
        Some("package-install") => {
            Ok(PACKAGE_INSTALL_CAPABILITIES.iter().fold(0, |set, number| set | 1 << number) & permitted)
        }
        Some(other) => Err(Failure::invalid(format!("privileges {other:?}"))),
    }
}

fn environment(context: &Context, ask: &wire::Exec, identity: &Identity) -> Environment {
    let mut env = Environment::from([(b"PATH".to_vec(), PATH_DEFAULT.to_vec())]);
    env.insert(b"HOME".to_vec(), identity.home.clone());
    if let Some(name) = &identity.name {
        env.insert(b"USER".to_vec(), name.clone());
        env.insert(b"LOGNAME".to_vec(), name.clone());
    }
    if let Some(term) = ask.pty.as_ref().map(|pty| pty.term.as_ref()) {
        env.insert(b"TERM".to_vec(), term.map_or(b"xterm-256color".to_vec(), |term| term.0.clone()));
    }
    env.extend(context.config.env.iter().map(|(key, value)| (key.clone(), value.clone())));
    let own = ask.env.iter().flatten();
    env.extend(own.map(|(Text(key), Text(value))| (key.clone(), value.clone())));
    env.retain(|key, _| !key.is_empty() && !key.contains(&b'='));
    env
}

/// A name with a slash is a path; any other is looked for in PATH. Relative ones are found from cwd.
fn candidates(name: &[u8], path: Option<&Vec<u8>>) -> Outcome<Vec<CString>> {
    if name.is_empty() {
        return Err(Failure::new("not_found", "the name of the program is empty"));
    }
    if name.contains(&b'/') {
        return Ok(vec![c_string(name)?]);
    }
    let path = path.map_or(PATH_DEFAULT, Vec::as_slice);
    path.split(|byte| *byte == b':')
        .map(|folder| if folder.is_empty() { &b"."[..] } else { folder })
        .map(|folder| c_string(&[folder, b"/", name].concat()))
        .collect()
}

fn command(terminal: bool) -> Operation {
    Operation::new(Task::Command(Command { pid: 0, terminal, started_ns: 0, exit: None, quiet_at: None }))
}

fn pipe() -> Outcome<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?)
}

fn pipes(context: &mut Context, stream: u32, stderr: Option<u32>, stdin: bool) -> Outcome<Ends> {
    let mut operation = command(false);
    let child_in = if stdin {
        let (read, write) = pipe()?;
        rustix::io::ioctl_fionbio(&write, true)?;
        operation = operation.takes(stream, write);
        read
    } else {
        context.nothing()?
    };
    let (from_child, child_out) = pipe()?;
    operation = operation.gives(stream, stream, Role::Output, from_child);
    let child_err = match stderr {
        None => child_out.try_clone()?,
        Some(via) => {
            let (from_child, child_err) = pipe()?;
            operation = operation.gives(stream, via, Role::Stderr, from_child);
            child_err
        }
    };
    Ok(Ends { stdio: [child_in, child_out, child_err], operation })
}

fn terminal(stream: u32, stderr: Option<u32>, size: &wire::Pty, owner: &Identity) -> Outcome<Ends> {
    if stderr.is_some() {
        return Err(Failure::invalid("a terminal has no stderr of its own"));
    }
    let Pty { master, slave } = pty::new(size, owner)?;
    let operation =
        command(true).takes(stream, master.try_clone()?).gives(stream, stream, Role::Output, master);
    Ok(Ends { stdio: [slave.try_clone()?, slave.try_clone()?, slave], operation })
}

/// END, once the command is gone and its output is read.
pub fn end(command: &Command, exit: &Exit, stdout_bytes: u64, stderr_bytes: u64) -> Vec<u8> {
    let (key, value) = match libc::WIFSIGNALED(exit.status) {
        true => ("signal", libc::WTERMSIG(exit.status)),
        false => ("code", libc::WEXITSTATUS(exit.status)),
    };
    let rusage = Object::new()
        .number("user_us", exit.user_us)
        .number("system_us", exit.system_us)
        .number("max_rss_kb", exit.max_rss_kb)
        .finish();
    let ok = Object::new()
        .number(key, value)
        .number("stdout_bytes", stdout_bytes)
        .number("stderr_bytes", stderr_bytes)
        .number("started_ns", command.started_ns)
        .number("ended_ns", exit.ended_ns)
        .raw("rusage", &rusage)
        .finish();
    Object::new().raw("ok", &ok).finish().into_bytes()
}

pub fn boot_clock_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The process, or its whole group.
pub fn signal(pid: i32, signal: i32, group: bool) {
    // SAFETY: no pointers; a process that is gone is no error here.
    unsafe { libc::kill(if group { -pid } else { pid }, signal) };
}

/// Ends a command for good: its group, and whatever of its session made a group of its own.
pub fn kill_session(pid: i32) {
    signal(pid, libc::SIGKILL, true);
    signal(pid, libc::SIGKILL, false);
    let Ok(entries) = std::fs::read_dir("/proc") else { return };
    for entry in entries.flatten() {
        let Some(other) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        if session_of(other) == Some(pid) {
            signal(other, libc::SIGKILL, false);
        }
    }
}

fn session_of(pid: i32) -> Option<i32> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything: fields are counted from the last ')'.
    let fields = &stat[stat.iter().rposition(|byte| *byte == b')')? + 1..];
    let session = fields.split(|byte| *byte == b' ').nth(4)?;
    std::str::from_utf8(session).ok()?.parse().ok()
}
