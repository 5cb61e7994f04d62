//! What a stream asked for, while it runs: its descriptors and what must happen before END.

use crate::egress::trust::Trust;
use crate::exec::boot_clock_ns;
use crate::poller::{Poller, Want, Watched};
use std::os::fd::OwnedFd;
use std::time::Instant;

/// Which descriptor of an operation is ready, in the low bits of its token.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Input = 0,
    Output = 1,
    Stderr = 2,
    Result = 3,
}

pub fn token(stream: u32, role: Role) -> u64 {
    u64::from(stream) << 2 | role as u64
}

pub fn of_token(token: u64) -> (u32, Role) {
    let role = match token & 3 {
        0 => Role::Input,
        1 => Role::Output,
        2 => Role::Stderr,
        _ => Role::Result,
    };
    ((token >> 2) as u32, role)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    pub status: i32,
    pub ended_ns: u64,
    pub user_us: u64,
    pub system_us: u64,
    pub max_rss_kb: u64,
}

impl Exit {
    /// Any child that has ended, and how.
    pub fn next() -> Option<(i32, Exit)> {
        let mut status = 0;
        // SAFETY: wait4 fills both; a zeroed rusage is valid.
        let (pid, usage) = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            (libc::wait4(-1, &mut status, libc::WNOHANG, &mut usage), usage)
        };
        let us = |time: libc::timeval| time.tv_sec as u64 * 1_000_000 + time.tv_usec as u64;
        let exit = Exit {
            status,
            ended_ns: boot_clock_ns(),
            user_us: us(usage.ru_utime),
            system_us: us(usage.ru_stime),
            max_rss_kb: usage.ru_maxrss as u64,
        };
        (pid > 0).then_some((pid, exit))
    }
}

pub struct Command {
    pub pid: i32,
    pub terminal: bool,
    pub started_ns: u64,
    pub exit: Option<Exit>,
    /// After the exit: output that comes later than this is not waited for.
    pub quiet_at: Option<Instant>,
}

pub struct Worker {
    /// None: it has exited; its last words may still stand in the pipes.
    pub pid: Option<i32>,
    pub result: Option<Watched>,
    pub lines: Vec<u8>,
    pub end: Option<Vec<u8>>,
}

pub struct Port {
    pub connecting: bool,
    /// ::1, when 127.0.0.1 refuses.
    pub fallback: Option<std::net::SocketAddr>,
}

pub enum Task {
    Command(Command),
    Worker(Worker),
    Port(Port),
    Trust(Trust),
}

/// One direction to the host, and the stream that carries it.
pub struct Output {
    pub stream: u32,
    pub source: Option<Watched>,
    /// Many bytes came: read several times a turn from a larger pipe.
    pub bulk: bool,
}

pub struct Operation {
    pub task: Task,
    pub input: Option<Watched>,
    pub outputs: Vec<Output>,
    pub last_input_byte: u8,
}

impl Operation {
    pub fn new(task: Task) -> Self {
        Operation { task, input: None, outputs: Vec::new(), last_input_byte: b'\n' }
    }

    pub fn takes(mut self, stream: u32, fd: OwnedFd) -> Self {
        self.input = Some(Watched::new(fd, Want::Write, token(stream, Role::Input)));
        self
    }

    pub fn gives(mut self, stream: u32, via: u32, role: Role, fd: OwnedFd) -> Self {
        let source = Some(Watched::new(fd, Want::Read, token(stream, role)));
        self.outputs.push(Output { stream: via, source, bulk: false });
        self
    }

    pub fn outputs_are_over(&self) -> bool {
        self.outputs.iter().all(|output| output.source.is_none())
    }

    pub fn close(self, poller: &Poller) {
        let result = match self.task {
            Task::Worker(worker) => worker.result,
            _ => None,
        };
        let sources = self.outputs.into_iter().filter_map(|output| output.source);
        sources.chain(self.input).chain(result).for_each(|watched| watched.close(poller));
    }
}
