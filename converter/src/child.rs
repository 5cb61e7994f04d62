//! mkfs.erofs, started before the first hostile byte is read. It gets a normalised tar on its
//! standard input and the output file as its only other descriptor.

use crate::lock_down;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

const OUTPUT: RawFd = 3;
const PIPE_BYTES: libc::c_int = 1 << 20;
/// Descriptors come in below this (see `protocol`).
const ABOVE_ALL: RawFd = 200;

pub struct Mkfs {
    process: libc::pid_t,
    pub input: File,
}

/// No inline data, because gVisor maps pages; `-T0` is the time of the image alone, the files keep theirs.
const OPTIONS: &[&CStr] = &[
    c"--quiet",
    c"--tar=f",
    c"--sort=none",
    c"-Enoinline_data",
    c"-T0",
    c"--mkfs-time",
    c"-U00000000-0000-0000-0000-000000000000",
    c"/proc/self/fd/3",
];

pub fn start(program: &CString, output: &File) -> io::Result<Mkfs> {
    let mut ends = [0 as RawFd; 2];
    // SAFETY: the array has room for two descriptors.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: both descriptors are new and ours.
    let (reading, input) = unsafe { (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1])) };
    // SAFETY: a plain call; a smaller pipe works as well.
    unsafe { libc::fcntl(input.as_raw_fd(), libc::F_SETPIPE_SZ, PIPE_BYTES) };
    let argv: Vec<*const libc::c_char> = std::iter::once(program.as_ptr())
        .chain(OPTIONS.iter().map(|option| option.as_ptr()))
        .chain(std::iter::once(std::ptr::null()))
        .collect();
    // SAFETY: this process has one thread, so the child may do what it likes before exec.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let error = become_mkfs(program, &argv, reading.as_raw_fd(), output.as_raw_fd());
            eprintln!("cloche-convert: cannot start mkfs.erofs: {error}");
            // SAFETY: ends this process without running the parent's clean-up.
            unsafe { libc::_exit(127) }
        }
        process => Ok(Mkfs { process, input }),
    }
}

fn become_mkfs(program: &CStr, argv: &[*const libc::c_char], reading: RawFd, output: RawFd) -> io::Error {
    let environment = [std::ptr::null::<libc::c_char>()];
    // SAFETY: plain calls on descriptors that are ours; the vectors end with a null pointer.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        let kept = libc::fcntl(output, libc::F_DUPFD, ABOVE_ALL);
        if kept < 0 || libc::dup2(reading, 0) < 0 || libc::dup2(kept, OUTPUT) < 0 {
            return io::Error::last_os_error();
        }
        if libc::syscall(libc::SYS_close_range, OUTPUT + 1, libc::c_uint::MAX, 0) != 0 {
            return io::Error::last_os_error();
        }
        if let Err(error) = lock_down::mkfs() {
            return error;
        }
        libc::execve(program.as_ptr(), argv.as_ptr(), environment.as_ptr());
    }
    io::Error::last_os_error()
}

impl Mkfs {
    /// Ends its input and waits. True when it succeeded.
    pub fn finish(self) -> io::Result<bool> {
        drop(self.input);
        let mut status = 0;
        // SAFETY: waits for our own child; the status is a live integer.
        while unsafe { libc::waitpid(self.process, &mut status, 0) } < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        Ok(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0)
    }
}
