//! `cloche-guest`: PID 1 of a sandbox. See the crate's documentation.
//!
//! Without Rust's own start-up: it opens /dev/null, which an initramfs need not have, and it costs system
//! calls before HELLO.
#![no_main]

use cloche_guest::carrier::Carrier;
use cloche_guest::microvm;
use cloche_guest::serve::Agent;
use std::ffi::{c_char, c_int, CStr};

struct Options {
    carrier: Option<String>,
    mounts: bool,
    egress: bool,
}

fn options(arguments: &[String]) -> Result<Options, String> {
    let mut options = Options { carrier: None, mounts: true, egress: true };
    let mut arguments = arguments.iter().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--carrier" => options.carrier = Some(arguments.next().ok_or("--carrier needs a path")?.clone()),
            // For tests: an ordinary process of some machine, whose files and addresses are not ours.
            "--no-mounts" => (options.mounts, options.egress) = (false, false),
            "--egress" => options.egress = true,
            other => return Err(format!("unknown option {other:?}")),
        }
    }
    Ok(options)
}

fn run(machine: bool, arguments: &[String]) -> Result<(), String> {
    // The kernel hands /init words of its command line that are not ours.
    let options = if machine { options(&[])? } else { options(arguments)? };
    let carrier = match &options.carrier {
        _ if machine => microvm::prepare()?,
        Some(path) => Carrier::open(path).map_err(|error| format!("{path}: {error}"))?,
        None => Carrier::from_stdin().map_err(|error| format!("standard input: {error}"))?,
    };
    let mut agent =
        Agent::new(carrier, options.mounts, options.egress).map_err(|error| format!("start: {error}"))?;
    let result = agent.run().map_err(|error| format!("carrier: {error}"));
    agent.kill_all();
    result
}

/// Commands get 0, 1 and 2; nothing of ours may stand there by accident.
fn occupy_standard_descriptors() {
    // SAFETY: plain calls on numbers and a constant text.
    unsafe {
        loop {
            let fd = libc::open(c"/".as_ptr(), libc::O_PATH);
            if !(0..=2).contains(&fd) {
                libc::close(fd);
                return;
            }
        }
    }
}

/// # Safety
/// Called once, by the C start-up code, with its argument list.
#[no_mangle]
pub unsafe extern "C" fn main(count: c_int, values: *const *const c_char) -> c_int {
    let text = |at: usize| CStr::from_ptr(*values.add(at)).to_string_lossy().into_owned();
    let arguments: Vec<String> = (0..count as usize).map(text).collect();
    libc::signal(libc::SIGPIPE, libc::SIG_IGN);
    if libc::fcntl(2, libc::F_GETFD) < 0 {
        occupy_standard_descriptors();
    }
    let machine = microvm::is_init(&arguments);
    let result = run(machine, &arguments);
    if let Err(message) = &result {
        eprintln!("cloche-guest: {message}");
    }
    if machine {
        microvm::power_off();
    }
    c_int::from(result.is_err())
}
