//! The start of a command: everything between the agent's rights and the command's first instruction.
//!
//! The child shares the agent's memory until it execs (`CLONE_VM | CLONE_VFORK`), so it allocates nothing,
//! touches only its `Launch`, and reports a failure by writing there; the agent sleeps meanwhile.

use crate::failure::{Failure, Outcome};
use std::ffi::{c_char, c_int, c_void, CString};
use std::os::fd::RawFd;
use std::ptr;

const STACK_BYTES: usize = 65_536;

/// Where the child stands until it execs. Kept: a new one for each command would cost a mapping and its page faults.
pub struct Stack(Vec<u128>);

impl Default for Stack {
    fn default() -> Self {
        Stack(Vec::with_capacity(STACK_BYTES / 16))
    }
}

impl Stack {
    fn top(&mut self) -> *mut c_void {
        // SAFETY: one past the end of the allocation; a stack grows down from it.
        unsafe { self.0.as_mut_ptr().add(self.0.capacity()).cast() }
    }
}
const DESCRIPTORS_FALLBACK_MAX: i32 = 4_096;
const CAPABILITY_VERSION_3: u32 = 0x2008_0522;

pub struct Launch {
    pub argv: Vec<CString>,
    pub env: Vec<CString>,
    /// What to try, in order: argv[0] as it is, or in each directory of PATH.
    pub candidates: Vec<CString>,
    pub cwd: CString,
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub capabilities: u64,
    pub bounding: u64,
    pub umask: Option<u32>,
    pub processes: Option<u64>,
    pub open_files: Option<u64>,
    pub stdio: [RawFd; 3],
    pub terminal: bool,
}

/// The step that failed, for the message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum Step {
    Done,
    Session,
    Descriptors,
    Limits,
    Rights,
    Directory,
    Exec,
}

struct Shared<'a> {
    launch: &'a Launch,
    argv: *const *const c_char,
    env: *const *const c_char,
    step: Step,
    errno: c_int,
    tried: usize,
}

/// Starts the command; the pid, once it runs its own program.
pub fn start(launch: &Launch, stack: &mut Stack) -> Outcome<i32> {
    let pointers = |list: &[CString]| -> Vec<*const c_char> {
        list.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
    };
    let (argv, env) = (pointers(&launch.argv), pointers(&launch.env));
    let mut shared =
        Shared { launch, argv: argv.as_ptr(), env: env.as_ptr(), step: Step::Done, errno: 0, tried: 0 };
    // SAFETY: the child runs `enter` on its own stack with `shared`, both of which outlive it here: the
    // agent is stopped until the child execs or exits. The agent has no other thread.
    let pid = unsafe {
        libc::clone(
            enter,
            stack.top(),
            libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
            ptr::addr_of_mut!(shared).cast(),
        )
    };
    // SAFETY: the child wrote these through its pointer.
    let (step, errno, tried) = unsafe {
        let shared = ptr::addr_of!(shared);
        (ptr::read_volatile(&(*shared).step), ptr::read_volatile(&(*shared).errno), (*shared).tried)
    };
    if pid < 0 {
        return Err(Failure::os(
            "start a process",
            std::io::Error::last_os_error().raw_os_error().unwrap_or(0),
        ));
    }
    if step == Step::Done {
        return Ok(pid);
    }
    // SAFETY: reaps the child that has just exited.
    unsafe { libc::waitpid(pid, ptr::null_mut(), 0) };
    Err(explain(launch, step, errno, tried))
}

fn explain(launch: &Launch, step: Step, errno: i32, tried: usize) -> Failure {
    let program = launch.candidates.get(tried).unwrap_or(&launch.argv[0]).to_string_lossy().into_owned();
    match step {
        Step::Exec => {
            let mut failure = Failure::os(&program, errno);
            if errno == libc::EACCES && !has_execute_bit(&program) {
                failure.code = "not_executable";
            }
            failure
        }
        Step::Directory => Failure::os(&format!("cwd {}", launch.cwd.to_string_lossy()), errno),
        other => Failure::os(&format!("prepare the command ({other:?})"), errno),
    }
}

/// Tells "this is no program" from "you may not run it"; the answer goes into a message only.
fn has_execute_bit(path: &str) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

extern "C" fn enter(argument: *mut c_void) -> c_int {
    // SAFETY: `start` passes a Shared that lives until this process execs or exits.
    let shared = unsafe { &mut *argument.cast::<Shared<'_>>() };
    let (step, errno) = match prepare(shared.launch) {
        Err(failed) => failed,
        Ok(()) => execute(shared),
    };
    shared.step = step;
    shared.errno = errno;
    // SAFETY: ends this process without running anything of the agent's.
    unsafe { libc::_exit(127) }
}

type Failed = (Step, c_int);

fn errno() -> c_int {
    // SAFETY: musl and glibc give a valid pointer.
    unsafe { *libc::__errno_location() }
}

fn step(step: Step, result: c_int) -> Result<(), Failed> {
    if result < 0 {
        return Err((step, errno()));
    }
    Ok(())
}

fn prepare(launch: &Launch) -> Result<(), Failed> {
    // SAFETY: plain system calls on numbers and on memory that `launch` owns.
    unsafe {
        step(Step::Session, libc::setsid())?;
        for (target, fd) in launch.stdio.iter().enumerate() {
            step(Step::Descriptors, libc::dup2(*fd, target as c_int))?;
        }
        if libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) < 0 {
            for fd in 3..DESCRIPTORS_FALLBACK_MAX {
                libc::close(fd);
            }
        }
        if launch.terminal {
            step(Step::Session, libc::ioctl(0, libc::TIOCSCTTY as _, 0))?;
        }
        limit(libc::RLIMIT_NPROC as _, launch.processes)?;
        limit(libc::RLIMIT_NOFILE as _, launch.open_files)?;
        if let Some(mask) = launch.umask {
            libc::umask(mask as libc::mode_t);
        }
        surrender(launch.uid, launch.gid, &launch.groups, launch.capabilities, launch.bounding)
            .map_err(|errno| (Step::Rights, errno))?;
        step(Step::Directory, libc::chdir(launch.cwd.as_ptr()))?;
        default_signals();
    }
    Ok(())
}

unsafe fn limit(resource: c_int, value: Option<u64>) -> Result<(), Failed> {
    let Some(value) = value else { return Ok(()) };
    let mut current = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    let none = ptr::null_mut::<c_void>();
    libc::syscall(libc::SYS_prlimit64, 0, resource, none, ptr::addr_of_mut!(current));
    // The hard limit may be lower already, and only goes down.
    let value = value.min(current.rlim_max);
    let new = libc::rlimit64 { rlim_cur: value, rlim_max: value };
    step(Step::Limits, libc::syscall(libc::SYS_prlimit64, 0, resource, ptr::addr_of!(new), none) as c_int)
}

/// Becomes `uid` with at most `capabilities`; `bounding` is what the agent's bounding set holds. The agent has
/// no ambient set and has set no_new_privs for itself, which every child inherits (`rights::harden`).
///
/// # Safety
/// Changes the rights of the calling process: only for a child.
pub unsafe fn surrender(
    uid: u32,
    gid: u32,
    groups: &[u32],
    capabilities: u64,
    bounding: u64,
) -> Result<(), c_int> {
    let call = |result: libc::c_long| if result < 0 { Err(errno()) } else { Ok(()) };
    for number in (0..64).filter(|number| (bounding & !capabilities) >> number & 1 == 1) {
        call(libc::prctl(libc::PR_CAPBSET_DROP, number, 0, 0, 0).into())?;
    }
    if capabilities != 0 {
        call(libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0).into())?;
    }
    // Raw calls: libc's own would look for other threads to change too.
    let set = libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr());
    // An ordinary process (tests) cannot change groups and need not, when it stays who it is.
    if set < 0 && !(groups.is_empty() && libc::geteuid() == uid) {
        return Err(errno());
    }
    call(libc::syscall(libc::SYS_setresgid, gid, gid, gid))?;
    call(libc::syscall(libc::SYS_setresuid, uid, uid, uid))?;
    let header = [CAPABILITY_VERSION_3, 0];
    let (low, high) = (capabilities as u32, (capabilities >> 32) as u32);
    let sets = [low, low, low, high, high, high];
    call(libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()))?;
    for number in (0..64).filter(|number| capabilities >> number & 1 == 1) {
        call(libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_RAISE, number, 0, 0).into())?;
    }
    Ok(())
}

/// The agent ignores SIGPIPE and blocks SIGCHLD; a command must know neither.
///
/// # Safety
/// Changes how the calling process takes signals: only for a child.
pub unsafe fn default_signals() {
    libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    let none: u64 = 0;
    libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, ptr::addr_of!(none), 0, 8);
}

fn execute(shared: &mut Shared<'_>) -> Failed {
    let mut best = (Step::Exec, libc::ENOENT);
    for (index, candidate) in shared.launch.candidates.iter().enumerate() {
        // SAFETY: NUL-terminated text and null-terminated lists that `start` holds.
        unsafe { libc::execve(candidate.as_ptr(), shared.argv, shared.env) };
        match errno() {
            libc::ENOENT | libc::ENOTDIR if best.1 != libc::ENOENT => {}
            libc::ENOENT | libc::ENOTDIR => shared.tried = index,
            // As a shell does: a name that may not be run here may be found further on.
            libc::EACCES => {
                best = (Step::Exec, libc::EACCES);
                shared.tried = index;
            }
            other => {
                shared.tried = index;
                return (Step::Exec, other);
            }
        }
    }
    best
}
