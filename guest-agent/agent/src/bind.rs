//! `bind`: this sandbox's name, randomness and mounts, before its first command and again after a restore.

use crate::context::Config;
use crate::egress::listeners::RESOLVER_ADDRESS;
use crate::failure::{During, Failure, Outcome};
use crate::json::{list, Object};
use crate::poller::check;
use crate::wire::{self, Text};
use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;

pub const OWN: &str = "/run/cloche";
const ENTROPY_BYTES_MAX: usize = 4_096;
/// Certificates go there too (`trust`); unused, it costs nothing.
const OWN_OPTIONS: &str = "size=16m,mode=0755";

/// What earlier binds did: a restored sandbox is bound again and must not pile up mounts.
#[derive(Default)]
pub struct Bound {
    own: bool,
    over: BTreeSet<&'static str>,
    tmp: bool,
    read_only: bool,
}

pub fn mount(source: &str, target: &str, kind: &str, flags: libc::c_ulong, data: &str) -> io::Result<()> {
    let text = |text: &str| CString::new(text).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
    let (source, target, kind, data) = (text(source)?, text(target)?, text(kind)?, text(data)?);
    // SAFETY: four NUL-terminated texts that live through the call.
    let result =
        unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, data.as_ptr().cast()) };
    check(result).map(drop)
}

/// A bind takes its flags only in a second call.
pub fn bind_with(source: &str, target: &str, flags: libc::c_ulong) -> io::Result<()> {
    mount(source, target, "", libc::MS_BIND, "")?;
    mount("", target, "", libc::MS_BIND | libc::MS_REMOUNT | flags, "")
}

/// The answer for END.
pub fn run(
    ask: &wire::Bind,
    config: &mut Config,
    bound: &mut Bound,
    mounts: bool,
    mut warnings: Vec<String>,
) -> Outcome<String> {
    let mut note = |what: &str, result: io::Result<()>| {
        if let Err(error) = result {
            warnings.push(format!("{what}: {error}"));
        }
    };
    if let Some(hex) = &ask.entropy {
        note("entropy", feed_entropy(&unhex(hex)?));
    }
    if let Some(time_ns) = ask.time_ns {
        note("clock", set_clock(time_ns));
    }
    if mounts {
        if let Some(hostname) = &ask.hostname {
            // SAFETY: pointer and length describe the text.
            note(
                "hostname",
                check(unsafe { libc::sethostname(hostname.as_ptr().cast(), hostname.len()) }).map(drop),
            );
        }
        identity_files(ask, bound, &mut note);
        temporary(ask.tmp.as_ref(), bound)?;
        if ask.root_read_only && !bound.read_only {
            read_only_root(ask.writable.as_deref().unwrap_or(&[]))?;
            bound.read_only = true;
        }
    }
    remember(ask, config);
    let users = fs::exists("/etc/passwd").unwrap_or(false);
    let ok = Object::new().flag("users", users).raw("warnings", &list(&warnings)).finish();
    Ok(Object::new().raw("ok", &ok).finish())
}

fn remember(ask: &wire::Bind, config: &mut Config) {
    if let Some(env) = &ask.env {
        config.env = env.iter().map(|(Text(key), Text(value))| (key.clone(), value.clone())).collect();
    }
    if let Some(user) = &ask.user {
        config.user = user.clone();
    }
    if let Some(limits) = ask.limits {
        config.limits = limits;
    }
}

fn unhex(text: &str) -> Outcome<Vec<u8>> {
    let digit = |byte: u8| (byte as char).to_digit(16).ok_or_else(|| Failure::invalid("entropy is not hex"));
    if text.len() % 2 != 0 || text.len() > 2 * ENTROPY_BYTES_MAX {
        return Err(Failure::invalid("entropy: an even number of digits, at most 8192"));
    }
    text.as_bytes().chunks(2).map(|pair| Ok((digit(pair[0])? << 4 | digit(pair[1])?) as u8)).collect()
}

fn feed_entropy(bytes: &[u8]) -> io::Result<()> {
    fs::File::options().write(true).open("/dev/urandom")?.write_all(bytes)
}

/// Only where the guest has a clock of its own that stood still (a restored machine).
fn set_clock(time_ns: u64) -> io::Result<()> {
    const GOOD_ENOUGH_NS: u64 = 100_000_000;
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    let now_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
    if now_ns.abs_diff(time_ns) < GOOD_ENOUGH_NS {
        return Ok(());
    }
    let time = rustix::time::Timespec {
        tv_sec: (time_ns / 1_000_000_000) as i64,
        tv_nsec: (time_ns % 1_000_000_000) as _,
    };
    Ok(rustix::time::clock_settime(rustix::time::ClockId::Realtime, time)?)
}

/// Made once, over whatever an image has there.
pub fn own_folder(bound: &mut Bound) -> io::Result<()> {
    if !bound.own {
        fs::create_dir_all(OWN)?;
        mount("tmpfs", OWN, "tmpfs", libc::MS_NOSUID | libc::MS_NODEV, OWN_OPTIONS)?;
        bound.own = true;
    }
    Ok(())
}

fn identity_files(ask: &wire::Bind, bound: &mut Bound, note: &mut dyn FnMut(&str, io::Result<()>)) {
    let made = own_folder(bound);
    let failed = made.is_err();
    note(OWN, made);
    if failed {
        return;
    }
    let name = ask.hostname.as_deref().unwrap_or("sandbox");
    let boot_id = boot_id(ask.machine_id.as_deref());
    let resolver = ask.egress.as_ref().map_or("127.0.0.1".into(), |_| RESOLVER_ADDRESS.ip().to_string());
    let resolv_conf = format!("nameserver {resolver}\noptions timeout:1 attempts:1\n");
    let files: [(&'static str, Option<String>); 5] = [
        ("/etc/hostname", ask.hostname.as_ref().map(|name| format!("{name}\n"))),
        ("/etc/hosts", Some(format!("127.0.0.1\tlocalhost {name}\n::1\tlocalhost ip6-localhost\n"))),
        ("/etc/machine-id", ask.machine_id.as_ref().map(|id| format!("{id}\n"))),
        ("/etc/resolv.conf", Some(resolv_conf)),
        ("/proc/sys/kernel/random/boot_id", Some(boot_id)),
    ];
    for (target, content) in files {
        if let Some(content) = content {
            note(target, place(target, &content, bound));
        }
    }
}

/// Written in place, so that an existing bind shows it at once; bound over `target` the first time.
fn place(target: &'static str, content: &str, bound: &mut Bound) -> io::Result<()> {
    let own = format!("{OWN}/{}", target.rsplit('/').next().unwrap_or(target));
    fs::write(&own, content)?;
    if bound.over.contains(target) {
        return Ok(());
    }
    fs::set_permissions(&own, fs::Permissions::from_mode(0o444))?;
    std::os::unix::fs::chown(&own, Some(0), Some(0))?;
    if !fs::exists(target)? {
        fs::File::create_new(target)?;
        std::os::unix::fs::chown(target, Some(0), Some(0))?;
    }
    bind_with(&own, target, libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC)?;
    bound.over.insert(target);
    Ok(())
}

/// A fresh one each time: all clones of a snapshot have the same.
fn boot_id(machine_id: Option<&str>) -> String {
    let mut bytes = [0u8; 16];
    if rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::NONBLOCK).is_err() {
        let seed = machine_id.unwrap_or("").bytes();
        bytes.iter_mut().zip(seed).for_each(|(byte, seed)| *byte = seed);
    }
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}\n", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// FS-1: /tmp is nosuid,nodev before any command, or there is no sandbox.
fn temporary(tmp: Option<&wire::Tmp>, bound: &mut Bound) -> Outcome<()> {
    if bound.tmp {
        return Ok(());
    }
    let what = || "/tmp nosuid,nodev".to_string();
    if !fs::exists("/tmp").unwrap_or(false) {
        fs::create_dir("/tmp").during(what)?;
        fs::set_permissions("/tmp", fs::Permissions::from_mode(0o1777)).during(what)?;
        std::os::unix::fs::chown("/tmp", Some(0), Some(0)).during(what)?;
    }
    let (noexec, size) = tmp.map_or((false, None), |tmp| (tmp.noexec, tmp.size_bytes));
    let flags = libc::MS_NOSUID | libc::MS_NODEV | if noexec { libc::MS_NOEXEC } else { 0 };
    match (noexec, size) {
        (false, None) => bind_with("/tmp", "/tmp", flags).during(what)?,
        (_, size) => {
            let size = size.map_or(String::new(), |bytes| format!(",size={bytes}"));
            mount("tmpfs", "/tmp", "tmpfs", flags, &format!("mode=1777{size}")).during(what)?;
        }
    }
    bound.tmp = true;
    Ok(())
}

/// FS-5: all but /workspace, the named paths and what is mounted separately refuses writes.
fn read_only_root(writable: &[Text]) -> Outcome<()> {
    let mut keep = vec!["/workspace".to_string()];
    for Text(path) in writable {
        let path = String::from_utf8(path.clone()).map_err(|_| Failure::invalid("writable: not UTF-8"))?;
        keep.push(path);
    }
    for path in keep.iter().filter(|path| fs::exists(path).unwrap_or(false)) {
        mount(path, path, "", libc::MS_BIND, "").during(|| format!("keep {path} writable"))?;
    }
    let flags = libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY;
    mount("", "/", "", flags, "").during(|| "make / read-only".into())
}
