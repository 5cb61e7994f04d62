//! What the agent may do, and what it gives up at its start.

use cloche_protocol::limits::PACKAGE_INSTALL_CAPABILITIES;

/// The agent's own capabilities: what it can give, and what a child must drop.
#[derive(Default, Clone, Copy)]
pub struct Rights {
    pub permitted: u64,
    pub bounding: u64,
}

/// Gives up what no child may inherit, once, so that each start need not.
pub fn harden() -> Rights {
    const CAPABILITIES: u32 = 41;
    const SETPCAP: u64 = 1 << 8;
    let keep = PACKAGE_INSTALL_CAPABILITIES.iter().fold(0u64, |set, number| set | 1 << number);
    // SAFETY: prctl on numbers; capget fills two triples.
    unsafe {
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        libc::umask(0o022);
        for number in 1..=64 {
            if number != libc::SIGPIPE && number != libc::SIGKILL && number != libc::SIGSTOP {
                // Raw: libc keeps two numbers for itself, which a parent may have ignored all the same.
                let default = [0u64; 4];
                libc::syscall(libc::SYS_rt_sigaction, number, default.as_ptr(), std::ptr::null::<u64>(), 8);
            }
        }
        let (header, mut sets) = ([0x2008_0522u32, 0], [0u32; 6]);
        libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr());
        let permitted = u64::from(sets[1]) | u64::from(sets[4]) << 32;
        if permitted & SETPCAP == 0 {
            return Rights { permitted, bounding: 0 };
        }
        let held = (0..CAPABILITIES).filter(|n| libc::prctl(libc::PR_CAPBSET_READ, *n, 0, 0, 0) == 1);
        let bounding = held.fold(0u64, |set, number| set | 1 << number);
        for number in (0..CAPABILITIES).filter(|n| bounding & !keep & 1 << n != 0) {
            libc::prctl(libc::PR_CAPBSET_DROP, number, 0, 0, 0);
        }
        Rights { permitted, bounding: bounding & keep }
    }
}
