//! epoll, level-triggered. A descriptor is registered only while something is wanted of it, because a
//! hung-up one is reported whatever was asked.

use crate::calls;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

const EVENTS_PER_TURN_MAX: usize = 64;

pub struct Poller(OwnedFd);

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Want {
    Read,
    Write,
    Both,
    /// Only to hear that the other side is gone.
    Nothing,
}

impl Want {
    fn flags(self) -> u32 {
        (match self {
            Want::Read => libc::EPOLLIN,
            Want::Write => libc::EPOLLOUT,
            Want::Both => libc::EPOLLIN | libc::EPOLLOUT,
            Want::Nothing => 0,
        }) as u32
    }
}

/// What happened: the token, and whether one can read (or must look for a hang-up) or write.
#[derive(Clone, Copy)]
pub struct Ready {
    pub token: u64,
    pub read: bool,
    pub write: bool,
    pub hung_up: bool,
    pub failed: bool,
}

impl Poller {
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers.
        let fd = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: a fresh descriptor that nobody else owns.
        Ok(Poller(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    fn control(&self, action: i32, fd: RawFd, flags: u32, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: flags, u64: token };
        // SAFETY: `event` lives through the call.
        check(unsafe { libc::epoll_ctl(self.0.as_raw_fd(), action, fd, &mut event) }).map(drop)
    }

    pub fn add(&self, fd: RawFd, want: Want, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, want.flags(), token)
    }

    pub fn change(&self, fd: RawFd, want: Want, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, want.flags(), token)
    }

    pub fn remove(&self, fd: RawFd) {
        // Fails only for a descriptor that is not registered, which is what is wanted.
        let _ = self.control(libc::EPOLL_CTL_DEL, fd, 0, 0);
    }

    pub fn wait(&self, timeout: Option<Duration>, ready: &mut Vec<Ready>) {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS_PER_TURN_MAX];
        let ms = timeout.map_or(-1, |t| i32::try_from(t.as_micros().div_ceil(1000)).unwrap_or(i32::MAX));
        // SAFETY: the kernel writes at most EVENTS_PER_TURN_MAX events.
        let count = unsafe {
            calls::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), EVENTS_PER_TURN_MAX as i32, ms)
        };
        let has = |flags: u32, wanted: i32| flags & wanted as u32 != 0;
        // Interrupted (count < 0): the next turn sees the same events.
        ready.extend(events.iter().take(count.max(0) as usize).map(|event| {
            let flags = event.events;
            Ready {
                token: event.u64,
                read: has(flags, libc::EPOLLIN | libc::EPOLLHUP | libc::EPOLLERR),
                write: has(flags, libc::EPOLLOUT | libc::EPOLLERR | libc::EPOLLHUP),
                hung_up: has(flags, libc::EPOLLHUP),
                failed: has(flags, libc::EPOLLERR),
            }
        }));
    }
}

pub fn check(result: i32) -> io::Result<i32> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value),
    }
}

/// A descriptor and whether it is registered now.
pub struct Watched {
    pub fd: OwnedFd,
    token: u64,
    want: Want,
    armed: bool,
}

impl Watched {
    pub fn new(fd: OwnedFd, want: Want, token: u64) -> Self {
        Watched { fd, token, want, armed: false }
    }

    pub fn arm(&mut self, poller: &Poller, armed: bool) {
        if self.armed == armed {
            return;
        }
        self.armed = match armed {
            true => poller.add(self.fd.as_raw_fd(), self.want, self.token).is_ok(),
            false => {
                poller.remove(self.fd.as_raw_fd());
                false
            }
        };
    }

    /// Unregisters before closing: a child between fork and exec may hold a copy for a moment.
    pub fn close(mut self, poller: &Poller) {
        self.arm(poller, false);
    }
}
