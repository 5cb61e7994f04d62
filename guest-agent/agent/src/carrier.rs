//! The descriptor that joins guest and host.

use crate::calls;
use crate::poller::{check, Poller, Want};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

pub const READ_BYTES_MIN: usize = 16_384;
pub const READ_BYTES_MAX: usize = 524_288;
const SOCKET_BUFFER_BYTES: i32 = 1 << 20;
const RETRY_FIRST: Duration = Duration::from_millis(2);
const RETRY_MAX: Duration = Duration::from_millis(50);

pub enum Received {
    Bytes(usize),
    Nothing,
    /// The host hung up; on a socket for good.
    Gone,
}

pub struct Carrier {
    fd: OwnedFd,
    is_socket: bool,
    registered: Option<bool>,
    retry: Duration,
}

impl Carrier {
    /// Standard input: one end of a socketpair. It is moved away from 0, which commands get.
    pub fn from_stdin() -> io::Result<Self> {
        // SAFETY: no pointers; the result is a fresh descriptor.
        let fd = check(unsafe { libc::fcntl(0, libc::F_DUPFD_CLOEXEC, 3) })?;
        // SAFETY: just made, owned by nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let is_socket = rustix::fs::fstat(&fd)
            .is_ok_and(|s| rustix::fs::FileType::from_raw_mode(s.st_mode) == rustix::fs::FileType::Socket);
        Ok(Carrier { fd, is_socket, registered: None, retry: RETRY_FIRST })
    }

    pub fn open(path: &str) -> io::Result<Self> {
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
        let fd = File::options().read(true).write(true).custom_flags(flags).open(path)?.into();
        Ok(Carrier { fd, is_socket: false, registered: None, retry: RETRY_FIRST })
    }

    fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Not needed for the first bytes, so not done before them.
    pub fn enlarge(&self) {
        if !self.is_socket {
            return;
        }
        for option in [libc::SO_SNDBUF, libc::SO_RCVBUF] {
            let value = SOCKET_BUFFER_BYTES.to_ne_bytes();
            // SAFETY: pointer and length describe `value`. Refused: slower, not wrong.
            unsafe {
                libc::setsockopt(
                    self.raw(),
                    libc::SOL_SOCKET,
                    option,
                    value.as_ptr().cast(),
                    value.len() as u32,
                )
            };
        }
    }

    pub fn register(&mut self, poller: &Poller, token: u64, writing: bool) {
        if self.registered == Some(writing) {
            return;
        }
        let want = if writing { Want::Both } else { Want::Read };
        let done = match self.registered {
            None => poller.add(self.raw(), want, token),
            Some(_) => poller.change(self.raw(), want, token),
        };
        self.registered = done.is_ok().then_some(writing);
    }

    /// A port without a host is always "ready": look again later. Gives the time to wait.
    pub fn rest(&mut self, poller: &Poller) -> Duration {
        poller.remove(self.raw());
        self.registered = None;
        let now = self.retry;
        self.retry = (self.retry * 2).min(RETRY_MAX);
        now
    }

    pub fn receive(&mut self, buffer: &mut [u8]) -> io::Result<Received> {
        let (pointer, length) = (buffer.as_mut_ptr().cast(), buffer.len());
        // SAFETY: pointer and length describe `buffer`. recv takes no ancillary data.
        let count = unsafe {
            match self.is_socket {
                true => calls::recv(self.raw(), pointer, length, libc::MSG_DONTWAIT),
                false => calls::read(self.raw(), pointer, length),
            }
        };
        match count {
            0 => Ok(Received::Gone),
            count if count > 0 => {
                self.retry = RETRY_FIRST;
                Ok(Received::Bytes(count as usize))
            }
            _ => match io::Error::last_os_error() {
                e if is_transient(&e) => Ok(Received::Nothing),
                e if e.raw_os_error() == Some(libc::ECONNRESET) => Ok(Received::Gone),
                e => Err(e),
            },
        }
    }

    /// How many bytes the carrier took; 0 when it is full or nobody is there.
    pub fn send(&mut self, bytes: &[u8]) -> usize {
        let (pointer, length) = (bytes.as_ptr().cast(), bytes.len());
        // SAFETY: pointer and length describe `bytes`.
        let count = unsafe {
            match self.is_socket {
                true => calls::send(self.raw(), pointer, length, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL),
                false => calls::write(self.raw(), pointer, length),
            }
        };
        // A lasting error shows at the next receive, which decides what it means.
        count.max(0) as usize
    }

    pub fn is_socket(&self) -> bool {
        self.is_socket
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
