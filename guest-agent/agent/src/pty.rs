//! A terminal for a command.

use crate::failure::{During, Outcome};
use crate::poller::check;
use crate::users::Identity;
use crate::wire;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

pub struct Pty {
    pub master: OwnedFd,
    /// Held until the child has its own: without any slave, gVisor ends the master at once.
    pub slave: OwnedFd,
}

fn open(path: &str, nonblocking: bool) -> io::Result<File> {
    let wait = if nonblocking { libc::O_NONBLOCK } else { 0 };
    File::options().read(true).write(true).custom_flags(libc::O_NOCTTY | libc::O_CLOEXEC | wait).open(path)
}

pub fn new(size: &wire::Pty, owner: &Identity) -> Outcome<Pty> {
    let master: OwnedFd = open("/dev/ptmx", true)
        .or_else(|_| open("/dev/pts/ptmx", true))
        .during(|| "open a terminal".into())?
        .into();
    let (mut locked, mut number) = (0i32, 0u32);
    // SAFETY: both ioctls read or write one int.
    unsafe {
        check(libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK as _, &mut locked as *mut i32))?;
        check(libc::ioctl(master.as_raw_fd(), libc::TIOCGPTN as _, &mut number as *mut u32))?;
    }
    let slave: OwnedFd =
        open(&format!("/dev/pts/{number}"), false).during(|| "open the terminal's other end".into())?.into();
    // A terminal that its user does not own still works; `mesg` and the like do not.
    let _ = std::os::unix::fs::fchown(&slave, Some(owner.uid), Some(owner.gid));
    resize(&master, size)?;
    Ok(Pty { master, slave })
}

pub fn resize(master: &impl AsRawFd, size: &wire::Pty) -> io::Result<()> {
    let size = libc::winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: reads one winsize.
    check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSWINSZ as _, &size) }).map(drop)
}

/// What ends the input of a terminal: ^D (or what stty made of it), if the terminal is in line mode.
pub fn end_of_input(master: &impl AsRawFd) -> Option<u8> {
    // SAFETY: an all-zero termios is valid, and tcgetattr fills it.
    let settings = unsafe {
        let mut settings: libc::termios = std::mem::zeroed();
        check(libc::tcgetattr(master.as_raw_fd(), &mut settings)).ok()?;
        settings
    };
    (settings.c_lflag & libc::ICANON != 0).then_some(settings.c_cc[libc::VEOF])
}
