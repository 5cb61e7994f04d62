//! The system calls that move bytes, in the one form that gVisor makes cheap.
//!
//! Under systrap a system call is a signal to the engine. Where the code is `mov eax, NUMBER` right before `syscall`, the
//! engine puts a jump in its place at the first call; musl keeps the number elsewhere, and pays for the signal each
//! time. These behave as the C library's own, errno included.

#[cfg(target_arch = "x86_64")]
mod patched {
    use libc::{c_void, epoll_event};
    use std::arch::asm;

    /// Not inlined: each place of its own would be found, and cost its first signal, again.
    ///
    /// # Safety
    /// As for the system call.
    #[inline(never)]
    unsafe fn call<const NUMBER: u32>(a: usize, b: usize, c: usize, d: usize) -> isize {
        let result: isize;
        // Without `nostack`: what the jump leads to may write below the stack pointer, as a signal does.
        asm!(
            "mov eax, {number}",
            "syscall",
            number = const NUMBER,
            lateout("rax") result,
            in("rdi") a,
            in("rsi") b,
            in("rdx") c,
            in("r10") d,
            in("r8") 0,
            in("r9") 0,
            lateout("rcx") _,
            lateout("r11") _,
        );
        if result < 0 {
            *libc::__errno_location() = -result as i32;
            return -1;
        }
        result
    }

    pub unsafe fn read(fd: i32, to: *mut c_void, most: usize) -> isize {
        call::<{ libc::SYS_read as u32 }>(fd as usize, to as usize, most, 0)
    }

    pub unsafe fn write(fd: i32, from: *const c_void, count: usize) -> isize {
        call::<{ libc::SYS_write as u32 }>(fd as usize, from as usize, count, 0)
    }

    pub unsafe fn recv(fd: i32, to: *mut c_void, most: usize, flags: i32) -> isize {
        call::<{ libc::SYS_recvfrom as u32 }>(fd as usize, to as usize, most, flags as usize)
    }

    pub unsafe fn send(fd: i32, from: *const c_void, count: usize, flags: i32) -> isize {
        call::<{ libc::SYS_sendto as u32 }>(fd as usize, from as usize, count, flags as usize)
    }

    pub unsafe fn epoll_wait(fd: i32, events: *mut epoll_event, most: i32, ms: i32) -> i32 {
        call::<{ libc::SYS_epoll_wait as u32 }>(fd as usize, events as usize, most as usize, ms as usize)
            as i32
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) use libc::{epoll_wait, read, recv, send, write};
#[cfg(target_arch = "x86_64")]
pub(crate) use patched::{epoll_wait, read, recv, send, write};

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn they_are_the_system_calls() {
        let mut pair = [0; 2];
        let mut buffer = [0u8; 8];
        // SAFETY: every pointer is to a local variable of the length that is said.
        unsafe {
            assert_eq!(libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, pair.as_mut_ptr()), 0);
            let to = buffer.as_mut_ptr().cast();
            assert_eq!(recv(pair[1], to, 8, libc::MSG_DONTWAIT), -1);
            assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EAGAIN));
            assert_eq!(send(pair[0], b"ab".as_ptr().cast(), 2, libc::MSG_NOSIGNAL), 2);
            assert_eq!(write(pair[0], b"cd".as_ptr().cast(), 2), 2);
            let poller = libc::epoll_create1(libc::EPOLL_CLOEXEC);
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 7 };
            assert_eq!(libc::epoll_ctl(poller, libc::EPOLL_CTL_ADD, pair[1], &mut event), 0);
            event.u64 = 0;
            assert_eq!(epoll_wait(poller, &mut event, 1, -1), 1);
            assert_eq!({ event.u64 }, 7);
            assert_eq!(recv(pair[1], to, 3, 0), 3);
            assert_eq!(read(pair[1], to, 8), 1);
            assert_eq!(buffer[0], b'd');
            assert_eq!(epoll_wait(poller, &mut event, 1, 0), 0);
            assert_eq!(read(-1, to, 8), -1);
            assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EBADF));
            for fd in [pair[0], pair[1], poller] {
                libc::close(fd);
            }
        }
    }
}
