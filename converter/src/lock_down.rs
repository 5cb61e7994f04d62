//! What the process gives up before the first hostile byte: limits, privileges, system calls.
//!
//! The filters are allow-lists written by hand. Ours has no exec, no open, no socket, no new
//! process or thread, and no memory that is executable; a call that is not listed ends the process.

use std::io;

/// One call that may be made; `without` names bits that an argument must not have.
struct Rule {
    call: libc::c_long,
    without: Option<(u32, u32)>,
}

const fn rule(call: libc::c_long) -> Rule {
    Rule { call, without: None }
}

const fn not_executable(call: libc::c_long) -> Rule {
    Rule { call, without: Some((2, libc::PROT_EXEC as u32)) }
}

/// The worker: its descriptors, memory, waiting for its thread and for mkfs.erofs.
const WORKER: &[Rule] = &[
    rule(libc::SYS_read),
    rule(libc::SYS_readv),
    rule(libc::SYS_write),
    rule(libc::SYS_writev),
    rule(libc::SYS_pread64),
    rule(libc::SYS_pwrite64),
    rule(libc::SYS_lseek),
    rule(libc::SYS_sendfile),
    rule(libc::SYS_splice),
    rule(libc::SYS_sendto),
    rule(libc::SYS_fstat),
    rule(libc::SYS_fstatfs),
    rule(libc::SYS_fcntl),
    rule(libc::SYS_close),
    rule(libc::SYS_ftruncate),
    rule(libc::SYS_brk),
    not_executable(libc::SYS_mmap),
    not_executable(libc::SYS_mprotect),
    rule(libc::SYS_munmap),
    rule(libc::SYS_mremap),
    rule(libc::SYS_madvise),
    rule(libc::SYS_futex),
    rule(libc::SYS_clock_gettime),
    rule(libc::SYS_getrandom),
    rule(libc::SYS_sched_yield),
    rule(libc::SYS_rt_sigprocmask),
    rule(libc::SYS_rt_sigreturn),
    rule(libc::SYS_sigaltstack),
    rule(libc::SYS_restart_syscall),
    rule(libc::SYS_wait4),
    rule(libc::SYS_exit),
    rule(libc::SYS_exit_group),
];

/// mkfs.erofs: it must be started and open its output once; no process, no socket, no signal.
const MKFS: &[Rule] = &[
    rule(libc::SYS_execve),
    rule(libc::SYS_openat),
    rule(libc::SYS_read),
    rule(libc::SYS_write),
    rule(libc::SYS_writev),
    rule(libc::SYS_pread64),
    rule(libc::SYS_pwrite64),
    rule(libc::SYS_lseek),
    rule(libc::SYS_close),
    rule(libc::SYS_dup),
    rule(libc::SYS_fstat),
    rule(libc::SYS_newfstatat),
    rule(libc::SYS_fstatfs),
    rule(libc::SYS_fcntl),
    rule(libc::SYS_ioctl),
    rule(libc::SYS_ftruncate),
    rule(libc::SYS_fallocate),
    rule(libc::SYS_fsync),
    rule(libc::SYS_brk),
    rule(libc::SYS_mmap),
    rule(libc::SYS_mprotect),
    rule(libc::SYS_munmap),
    rule(libc::SYS_mremap),
    rule(libc::SYS_madvise),
    rule(libc::SYS_futex),
    rule(libc::SYS_set_tid_address),
    rule(libc::SYS_set_robust_list),
    rule(libc::SYS_rseq),
    rule(libc::SYS_prlimit64),
    rule(libc::SYS_readlinkat),
    rule(libc::SYS_getrandom),
    rule(libc::SYS_uname),
    rule(libc::SYS_sysinfo),
    rule(libc::SYS_umask),
    rule(libc::SYS_getpid),
    rule(libc::SYS_getcwd),
    rule(libc::SYS_clock_gettime),
    rule(libc::SYS_gettimeofday),
    rule(libc::SYS_rt_sigaction),
    rule(libc::SYS_rt_sigprocmask),
    rule(libc::SYS_exit),
    rule(libc::SYS_exit_group),
    #[cfg(target_arch = "x86_64")]
    rule(libc::SYS_arch_prctl),
    #[cfg(target_arch = "x86_64")]
    rule(libc::SYS_readlink),
];

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;

const NUMBER_AT: u32 = 0;
const ARCHITECTURE_AT: u32 = 4;
const ARGUMENTS_AT: u32 = 16;

fn filter(rules: &[Rule]) -> Vec<libc::sock_filter> {
    let step = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let load = |at| step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at, 0, 0);
    let equal = |k, jt, jf| step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, k, jt, jf);
    let answer = |k| step(libc::BPF_RET | libc::BPF_K, k, 0, 0);
    let kill = answer(libc::SECCOMP_RET_KILL_PROCESS);
    let allow = answer(libc::SECCOMP_RET_ALLOW);
    let mut program = vec![load(ARCHITECTURE_AT), equal(ARCHITECTURE, 1, 0), kill, load(NUMBER_AT)];
    for rule in rules {
        match rule.without {
            None => program.extend([equal(rule.call as u32, 0, 1), allow]),
            Some((argument, bits)) => program.extend([
                equal(rule.call as u32, 0, 4),
                load(ARGUMENTS_AT + 8 * argument),
                step(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, bits, 0, 1),
                kill,
                allow,
            ]),
        }
    }
    program.push(kill);
    program
}

fn checked(result: libc::c_long) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn install(rules: &[Rule], flags: libc::c_ulong) -> io::Result<()> {
    let mut program = filter(rules);
    let header = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the program is live during the call, and the kernel checks it.
    checked(unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &header) })
}

/// The filter of this process and all its threads.
pub fn worker() -> io::Result<()> {
    if crate::planted::off("seccomp") || crate::planted::off("unpack") {
        return Ok(());
    }
    install(WORKER, libc::SECCOMP_FILTER_FLAG_TSYNC)
}

/// The filter of mkfs.erofs, installed between fork and exec.
pub fn mkfs() -> io::Result<()> {
    install(MKFS, 0)
}

fn limit(what: i64, value: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: value as libc::rlim_t, rlim_max: value as libc::rlim_t };
    // SAFETY: the struct is live during the call.
    checked(unsafe { libc::setrlimit(what as _, &limit) }.into())
}

/// Before anything else: nothing here can be undone, and mkfs.erofs inherits it.
pub fn begin(seconds: u64) -> io::Result<()> {
    // SAFETY: plain calls with constant arguments.
    unsafe {
        checked(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into())?;
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        // The last resort where a read or write waits for ever.
        libc::alarm(u32::try_from(seconds.saturating_add(5)).unwrap_or(u32::MAX));
    }
    limit(libc::RLIMIT_CORE as i64, 0)?;
    limit(libc::RLIMIT_NOFILE as i64, 256)?;
    limit(libc::RLIMIT_CPU as i64, 2 * seconds.saturating_add(5))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filter_is_short_and_ends_in_kill() {
        let program = filter(WORKER);
        assert!(program.len() < 256);
        assert_eq!(program.last().unwrap().k, libc::SECCOMP_RET_KILL_PROCESS);
        for call in [libc::SYS_execve, libc::SYS_openat, libc::SYS_socket, libc::SYS_ptrace, libc::SYS_clone]
        {
            assert!(WORKER.iter().all(|rule| rule.call != call));
        }
    }
}
