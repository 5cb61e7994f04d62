//! A forked child for one file operation. It becomes the user it is for before it touches a path, so every
//! permission is checked by the kernel, and it may block without stopping the loop.
//!
//! It speaks to the loop by pipes: data in as 0, data out as 1, and on 2 a line `O{…}` when it has begun
//! (OPENED) and a line `E{…}` at its end (END).

use crate::child::{default_signals, surrender};
use crate::context::Context;
use crate::exec::capabilities;
use crate::failure::{Failure, Outcome};
use crate::operation::{token, Operation, Role, Task, Worker};
use crate::poller::{check, Want, Watched};
use crate::serve::ok;
use crate::users::Users;
use crate::{files, folders, tree_read, tree_write, watch, wire};
use serde::Deserialize;
use std::fs::File;
use std::io::Write;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const PIPE_BYTES: i32 = 1 << 20;

/// The worker's side of its pipes.
pub struct Channel {
    pub input: ManuallyDrop<File>,
    pub output: ManuallyDrop<File>,
    result: ManuallyDrop<File>,
}

impl Channel {
    /// The operation has begun; it cannot fail for a reason known beforehand.
    pub fn opened(&mut self, json: &str) {
        self.say('O', json.as_bytes());
    }

    fn say(&mut self, letter: char, json: &[u8]) {
        let line = [&[letter as u8][..], json, b"\n"].concat();
        // The loop has gone: then so has everybody who asked.
        let _ = self.result.write_all(&line);
    }
}

#[derive(Deserialize)]
struct Asker {
    user: Option<String>,
    privileges: Option<String>,
}

/// Which data pipes an operation has: in, out.
fn directions(op: &str) -> Option<(bool, bool)> {
    Some(match op {
        "file.write" | "tree.write" => (true, false),
        "file.read" | "fs.list" | "fs.watch" | "tree.read" => (false, true),
        "fs.stat" | "fs.mkdir" | "fs.move" | "fs.remove" => (false, false),
        _ => return None,
    })
}

pub fn is_worker(op: &str) -> bool {
    directions(op).is_some()
}

fn pipe(large: bool) -> Outcome<(OwnedFd, OwnedFd)> {
    let ends = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    if large {
        // SAFETY: no pointers. Refused: slower, not wrong.
        unsafe { libc::fcntl(ends.0.as_raw_fd(), libc::F_SETPIPE_SZ, PIPE_BYTES) };
    }
    Ok(ends)
}

pub fn start(context: &mut Context, stream: u32, op: &str, payload: &[u8]) -> Outcome<Operation> {
    let (takes, gives) = directions(op).ok_or_else(|| Failure::new("unsupported", op))?;
    let asker: Asker = wire::parse(payload)?;
    let user = asker.user.unwrap_or_else(|| context.config.user.clone());
    let identity = context.users().resolve(&user)?;
    let capabilities = capabilities(asker.privileges.as_deref(), context.rights.permitted)?;
    let (input, output, result) = (pipe(takes)?, pipe(gives)?, pipe(false)?);
    let bounding = context.rights.bounding;
    // SAFETY: the agent has one thread, so the child's copy of it is whole.
    let pid = check(unsafe { libc::fork() })?;
    if pid == 0 {
        let ends = [input.0.as_raw_fd(), output.1.as_raw_fd(), result.1.as_raw_fd()];
        // SAFETY: this is the child; it never returns into the agent.
        unsafe {
            for (target, fd) in ends.iter().enumerate() {
                libc::dup2(*fd, target as i32);
            }
            libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0);
            let became = surrender(identity.uid, identity.gid, &identity.groups, capabilities, bounding);
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
            default_signals();
            work(op, payload, became.map_err(|errno| Failure::os("become the user", errno)));
            libc::_exit(0)
        }
    }
    let result = Some(Watched::new(result.0, Want::Read, token(stream, Role::Result)));
    let mut operation =
        Operation::new(Task::Worker(Worker { pid: Some(pid), result, lines: Vec::new(), end: None }));
    if takes {
        rustix::io::ioctl_fionbio(&input.1, true)?;
        operation = operation.takes(stream, input.1);
    }
    if gives {
        rustix::io::ioctl_fionbio(&output.0, true)?;
        operation = operation.gives(stream, stream, Role::Output, output.0);
        operation.outputs[0].bulk = true;
    }
    Ok(operation)
}

/// In the child: 0, 1 and 2 are the pipes.
fn work(op: &str, payload: &[u8], ready: Outcome<()>) {
    // SAFETY: `start` put them there; ManuallyDrop, because they end with the process.
    let file = |fd| ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let mut channel = Channel { input: file(0), output: file(1), result: file(2) };
    let done = ready.and_then(|()| match op {
        "file.read" => files::read(&wire::parse(payload)?, &mut channel),
        "file.write" => files::write(&wire::parse(payload)?, &mut channel),
        "fs.stat" => folders::stat(&wire::parse(payload)?, &Users::read()),
        "fs.list" => folders::list(&wire::parse(payload)?, &mut channel, &Users::read()),
        "fs.mkdir" => folders::make(&wire::parse(payload)?),
        "fs.move" => folders::move_to(&wire::parse(payload)?),
        "fs.remove" => folders::remove(&wire::parse(payload)?),
        "fs.watch" => watch::watch(&wire::parse(payload)?, &mut channel),
        "tree.read" => tree_read::read(&wire::parse(payload)?, &mut channel),
        "tree.write" => tree_write::write(&wire::parse(payload)?, &mut channel),
        other => Err(Failure::new("unsupported", other)),
    });
    let end = match done {
        Ok(json) => ok(&json),
        Err(failure) => failure.end(),
    };
    channel.say('E', &end);
}
